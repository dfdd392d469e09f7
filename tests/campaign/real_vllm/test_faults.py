"""One proxy in front of real engines: stores and engines that fail, limits, policies, several processes."""

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy
from tests.campaign.real_vllm.plain import CHAT, SESSIONS, TOKENS, Conversation, Turn, continues, user
from tests.support.redis_server import RedisServer
from tests.support.utils import wait_until

pytestmark = [pytest.mark.timeout(START_TIMEOUT_S + 600), pytest.mark.kills_engine]

_ADMIN = "/admin/replicas"
_STALL_S = 1.0
_SLACK_S = 1.0
"""What the cores, which the engines use, may add."""
_FEW: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def stock(engines: dict[str, EngineProcess]) -> str:
    """The URL of a stock engine."""
    return engines["stock"].url


def _ask(conversation: Conversation, text: str) -> Turn:
    return conversation.ask(user(text), **_FEW)


def _store(http: httpx.Client) -> dict[str, Any]:
    state: dict[str, Any] = http.get("/ready").json()["store"]
    return state


def _replicas(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["engine"]: each for each in http.get(_ADMIN).json()["replicas"]}


def _completed(url: str) -> float:
    """Requests that an engine completed, by its own metric."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return sum(float(line.split()[-1]) for line in counts if 'finished_reason="abort"' not in line)


@contextmanager
def _in_turn(first: str, second: str) -> Iterator[httpx.Client]:
    """A client of a proxy that sends requests to two engines in turn, both ready."""
    flags = ("--upstream", second, "--policy", "round_robin", "--store", "memory:", "--watch-interval-s", "1")
    with run_proxy(first, *flags) as url, httpx.Client(base_url=url, timeout=120) as http:
        wait_until(lambda: all(each["ready"] for each in _replicas(http).values()))
        yield http


def _running(http: httpx.Client) -> dict[str, int]:
    """How many requests each replica has, by its URL."""
    return {url: each["requests"] for url, each in _replicas(http).items()}


def _served_by(http: httpx.Client, *engines: str) -> str:
    """The engine that served a short request."""
    before = {url: _completed(url) for url in engines}
    assert http.post(CHAT, json={"messages": [user("Hi.")], "max_tokens": 1}).status_code == 200
    wait_until(lambda: sum(map(_completed, before)) > sum(before.values()))
    [served] = [url for url, count in before.items() if _completed(url) > count]
    return served


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def _stopped(server: RedisServer) -> Iterator[None]:
    server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send(signal.SIGCONT)


def _begins(ids: list[int], turn: Turn) -> bool:
    exact = [*turn.prompt_ids, *turn.ids]
    return ids[: len(exact)] == exact


def _check_stall(stock: str, store: str, stalled: Callable[[], AbstractContextManager[None]]) -> None:
    flags = ("--store", store, "--store-timeout-s", f"{_STALL_S:g}")
    with run_proxy(stock, *flags) as url, httpx.Client(base_url=url, timeout=120) as http:
        conversation = Conversation(http, [], headers={"x-session-id": "stalled"})
        turns = [_ask(conversation, "Hi.")]
        began = time.monotonic()
        turns.append(_ask(conversation, "And?"))
        healthy_s = time.monotonic() - began
        with stalled():
            for text in ("More.", "Still more."):
                began = time.monotonic()
                turns.append(_ask(conversation, text))
                assert time.monotonic() - began < healthy_s + _STALL_S + _SLACK_S
            wait_until(lambda: _store(http)["state"] != "ok")
        wait_until(lambda: _store(http)["state"] == "ok")
        assert _store(http)["lost_turns"] == 0
        turns.append(_ask(conversation, "Go on."))
        assert continues(turns[-1], turns[-2])
        assert len(http.get(f"{SESSIONS}/stalled").json()["turns"]) == len(turns)
        samples = http.get(f"{SESSIONS}/stalled/samples").json()["samples"]
        recorded = [sample["prompt_ids"] + sample["completion_ids"] for sample in samples]
        assert all(any(_begins(ids, turn) for ids in recorded) for turn in turns)


def test_a_locked_file(stock: str, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.db"
    _check_stall(stock, f"sqlite://{file}", lambda: _locked(file))


def test_a_redis_that_hangs(stock: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        _check_stall(stock, f"redis://127.0.0.1:{server.port}/0", lambda: _stopped(server))
    finally:
        server.kill()


def test_a_store_that_is_not_there_at_the_start(stock: str, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    store = f"redis://127.0.0.1:{server.port}/0"
    with run_proxy(stock, "--store", store) as url, httpx.Client(base_url=url, timeout=120) as http:
        conversation = Conversation(http, [], headers={"x-session-id": "early"})
        turns = [_ask(conversation, "Hi.")]
        assert _store(http)["state"] == "unavailable"
        server.start()
        try:
            wait_until(lambda: _store(http)["state"] == "ok")
            turns.append(_ask(conversation, "And?"))
            assert continues(turns[1], turns[0])
        finally:
            server.kill()


def test_limits_answer_429_with_retry_after(stock: str) -> None:
    flags = ("--replica-requests", "1", "--queue-requests", "1", "--store", "memory:")
    with run_proxy(stock, *flags) as url, ThreadPoolExecutor(8) as pool:
        body = {"messages": [user("Count.")], "max_tokens": 64, "ignore_eos": True}
        sent = [pool.submit(httpx.post, url + CHAT, json=body, timeout=120) for _ in range(8)]
        answers = [each.result() for each in sent]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        # the places are free again
        assert httpx.post(url + CHAT, json=body, timeout=120).status_code == 200


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1%2fsessions/q", None, 400),
        ("/v1/../v1/models", None, 400),
        (TOKENS, {"prompt_ids": [2147483648], "max_tokens": 1}, 400),
        (CHAT, {"messages": [user("Hi.")], "max_tokens": 1, "choices": None}, 200),
    ],
)
def test_odd_requests_are_no_server_errors(
    proxies: dict[str, str], path: str, body: dict[str, Any] | None, status: int
) -> None:
    url = next(iter(proxies.values()))
    method = "GET" if body is None else "POST"
    request = httpx.Request(method, url, json=body, headers={"x-session-id": "odd"})
    request.extensions["target"] = path.encode()
    with httpx.Client(timeout=120) as http:
        answer = http.send(request)
    assert answer.status_code == status, answer.text


def test_two_processes_on_one_port_stay_exact(stock: str, tmp_path: Path) -> None:
    with run_proxy(stock, "--workers", "2", "--store", f"sqlite:///{tmp_path}/w.db") as url:
        conversation = Conversation(httpx.Client(base_url=url, timeout=120), [])
        turns = []
        for text in ("Hi.", "And?", "More.", "Go on.", "On.", "Stop."):
            # a new connection: any process
            with httpx.Client(base_url=url, timeout=120) as conversation.http:
                turns.append(_ask(conversation, text))
        assert all(continues(turn, before) for before, turn in itertools.pairwise(turns))
        page = httpx.get(f"{url}/metrics", timeout=30).text
        assert 'tokenproxy_turns_total{finish_reason="length",problem="none"} 6.0' in page


def test_top_shows_the_fleet(proxies: dict[str, str], stock: str) -> None:
    command = [sys.executable, "-m", "proxy.cli", "top", "--once", "--url", next(iter(proxies.values()))]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert stock in shown
    assert "ready" in shown


def test_policies_the_file_and_the_end_of_a_session(
    stock: str, second: EngineProcess, tmp_path: Path
) -> None:
    upstreams = tmp_path / "upstreams"
    for policy, exactly in (("round_robin", [2, 2]), ("least_loaded", None), ("two_choices", None)):
        upstreams.write_text(f"{stock}\n")
        flags = ("--upstreams-file", str(upstreams), "--watch-interval-s", "0.5")
        with (
            run_proxy(stock, "--policy", policy, "--store", "memory:", *flags) as url,
            httpx.Client(base_url=url, timeout=120) as http,
        ):
            assert list(_replicas(http)) == [stock]
            upstreams.write_text(f"{stock}\n{second.url}\n")
            wait_until(lambda: sum(each["ready"] for each in _replicas(http).values()) == 2)
            before = [_completed(each) for each in (stock, second.url)]
            for number in range(4):
                _ask(Conversation(http, []), f"Conversation {number}.")
            grown = [
                _completed(each) - count for each, count in zip((stock, second.url), before, strict=True)
            ]
            assert sum(grown) == 4
            assert exactly is None or grown == exactly
            named = Conversation(http, [], headers={"x-session-id": "one"})
            _ask(named, "Hi.")
            assert http.post("/finish_session?session_id=one").status_code == 200
            assert http.delete(f"{SESSIONS}/one").status_code in (200, 204)
            upstreams.write_text(f"{stock}\n")
            wait_until(lambda: list(_replicas(http)) == [stock])


def test_an_engine_that_hangs_loses_its_requests(stock: str, second: EngineProcess) -> None:
    with _in_turn(stock, second.url) as http:
        assert second.pid is not None
        os.killpg(second.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with ThreadPoolExecutor(8) as pool:
                sent: list[Future[httpx.Response]] = [
                    pool.submit(http.post, CHAT, json={"messages": [user(f"{n}")], **_FEW}) for n in range(8)
                ]
                wait_until(lambda: not _replicas(http)[second.url]["ready"])
                gone_s = time.monotonic() - began
                assert {each.result().status_code for each in sent} == {200}
        finally:
            os.killpg(second.pid, signal.SIGCONT)
        print(f"an engine that hangs gets no requests after {gone_s:.1f} s")
        assert gone_s < 15.0
        wait_until(lambda: _replicas(http)[second.url]["ready"])


def test_a_request_under_which_an_engine_dies_is_not_sent_to_another(
    stock: str, second: EngineProcess
) -> None:
    with _in_turn(stock, second.url) as http, ThreadPoolExecutor(1) as pool:
        body = {"messages": [user("Count.")], "max_tokens": 1500, "ignore_eos": True}
        while _served_by(http, stock, second.url) != stock:
            pass  # in turn: the second engine serves the next
        completed = _completed(stock)
        wait_until(lambda: _running(http) == {stock: 0, second.url: 0})
        sent = pool.submit(http.post, CHAT, json=body, timeout=240)
        wait_until(lambda: _running(http) == {stock: 0, second.url: 1})
        assert second.pid is not None
        os.killpg(second.pid, signal.SIGKILL)
        assert sent.result().status_code in (502, 503)
        assert _completed(stock) == completed
        again = http.post(CHAT, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (502, "engine_died")
