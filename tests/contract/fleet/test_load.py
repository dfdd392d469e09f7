"""Bounds on what runs on a replica, and the queue before it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest

from proxy.fleet.load import Capacity, Load
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until

_TOKENS = "/v1/chat/completions/tokens"
_IDS = {"prompt_ids": [1, 74]}


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(FakeVllm(tiny_model))


def test_room_counts_requests_and_ids() -> None:
    load = Load()
    capacity = Capacity(requests=2, ids=100)
    assert load.has_capacity(1000, capacity), "one that is larger than the bound runs alone"
    first = load.begin(60)
    assert load.has_capacity(40, capacity)
    assert not load.has_capacity(41, capacity)
    second = load.begin(1)
    assert not load.has_capacity(1, capacity)
    load.end(second)
    load.end(second)
    assert (load.requests, load.ids) == (1, 60)
    load.end(first)
    assert load.has_capacity(1000, capacity)
    assert not Load(running={first}).has_capacity(1, Capacity(requests=1))
    assert Load(running={first}).has_capacity(10**9, Capacity())


def _runs(engine: FakeVllm, count: int) -> bool:
    return engine.running == count


def _waiting(client: httpx.Client) -> float:
    page = client.get("/metrics").text
    [line] = [line for line in page.splitlines() if line.startswith("tokenproxy_requests_queued")]
    return float(line.rpartition(" ")[2])


def test_requests_beyond_the_bound_wait_for_a_place(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    body = json.dumps(_IDS).encode()
    with run_proxy([engine], replica_requests=2, queue_requests=2) as client, ExitStack() as stack:
        for _ in range(5):
            engine.replies.append(Reply(hold_at=0))
        for running in (1, 2):
            stack.enter_context(send_and_keep(client.base_url, _TOKENS, body))
            wait_until(partial(_runs, engine, running))
        leaves = ExitStack()
        leaves.enter_context(send_and_keep(client.base_url, _TOKENS, body))
        stack.enter_context(send_and_keep(client.base_url, _TOKENS, body))
        wait_until(lambda: _waiting(client) == 2)
        assert engine.running == 2
        refused = client.post(_TOKENS, json=_IDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        leaves.close()
        wait_until(lambda: _waiting(client) == 1)
        engine.release()
        wait_until(lambda: engine.running == 0 and _waiting(client) == 0)
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert client.get("/ready").json()["engines"][0]["requests"] == 0


def test_a_request_that_waits_for_too_long_is_refused(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], replica_requests=1, queue_timeout_s=0.2) as client:
        engine.replies.append(Reply(hold_at=0))
        with send_and_keep(client.base_url, _TOKENS, json.dumps(_IDS).encode()):
            wait_until(lambda: engine.running == 1)
            refused = client.post(_TOKENS, json=_IDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_timeout")


def test_waiting_requests_go_to_a_replica_that_joins(start: Callable[..., FakeVllm]) -> None:
    first, second = start(), start()
    with run_proxy([first], store="memory:", replica_requests=1) as client:
        first.replies.append(Reply(hold_at=0))
        with send_and_keep(client.base_url, _TOKENS, json.dumps(_IDS).encode()):
            wait_until(lambda: first.running == 1)
            with send_and_keep(client.base_url, _TOKENS, json.dumps(_IDS).encode()) as connection:
                wait_until(lambda: _waiting(client) == 1)
                client.post("/admin/replicas", json={"url": second.url})
                assert connection.recv(12) == b"HTTP/1.1 200"


def test_waiting_requests_end_when_nothing_responds(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], replica_requests=1) as client:
        engine.replies.append(Reply(hold_at=0))
        with send_and_keep(client.base_url, _TOKENS, json.dumps(_IDS).encode()):
            wait_until(lambda: engine.running == 1)
            with send_and_keep(client.base_url, _TOKENS, json.dumps(_IDS).encode()) as connection:
                wait_until(lambda: _waiting(client) == 1)
                engine.kill()
                # 502 if it was still sent over a connection that was open, so that it may have run
                assert connection.recv(12) in (b"HTTP/1.1 502", b"HTTP/1.1 503")
