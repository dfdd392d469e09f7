"""Which failed requests run once more, and on which replica."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until

_CHAT, _ADMIN = "/v1/chat/completions", "/admin/replicas"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_OTHER = {"messages": [{"role": "user", "content": "Hello"}]}
_NEVER_S = 60


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(FakeVllm(tiny_model))


def _generations(engine: FakeVllm) -> int:
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def _in_order(client: httpx.Client, engines: list[FakeVllm]) -> list[FakeVllm]:
    """The engines in the order in which round robin chooses them from now on."""
    assert client.post(_CHAT, json={"messages": [{"role": "user", "content": "First"}]}).status_code == 200
    [last] = [position for position, engine in enumerate(engines) if _generations(engine)]
    ordered = [*engines[last + 1 :], *engines[: last + 1]]
    for engine in engines:
        engine.requests.clear()
    return ordered


def _states(client: httpx.Client) -> list[bool]:
    return [engine["ready"] for engine in client.get("/ready").json()["engines"]]


def _error_stream(code: object) -> Canned:
    event = b'data: {"error": {"message": "no", "type": "x", "code": %s}}\n\ndata: [DONE]\n\n'
    return Canned(event % str(code).encode(), 200, {"content-type": "text/event-stream"})


@pytest.mark.parametrize("code", [500, 503, '"internal"', "null", 7])
def test_stream_that_begins_with_a_server_error_runs_elsewhere(
    start: Callable[..., FakeVllm], code: object
) -> None:
    engines = [start() for _ in range(2)]
    with run_proxy(engines, policy="round_robin") as client:
        bad, good = _in_order(client, engines)
        bad.replies.append(Reply(error=_error_stream(code)))
        response = client.post(_CHAT, json={**_HI, "stream": True})
        assert (response.status_code, response.content[-14:]) == (200, b"data: [DONE]\n\n")
        assert (_generations(bad), _generations(good)) == (1, 1)
        assert b'"error"' not in response.content


def test_stream_that_begins_with_a_refusal_is_the_answer(start: Callable[..., FakeVllm]) -> None:
    engines = [start() for _ in range(2)]
    with run_proxy(engines, policy="round_robin") as client:
        bad, good = _in_order(client, engines)
        bad.replies.append(Reply(error=_error_stream(400)))
        response = client.post(_CHAT, json={**_HI, "stream": True})
        assert (response.status_code, response.json()["error"]["message"]) == (400, "no")
        assert _generations(good) == 0


def test_request_alone_on_an_engine_whose_core_died_is_not_run_again(start: Callable[..., FakeVllm]) -> None:
    """vLLM's API server outlives its engine core: it answers 500, and 503 on /health."""
    engines = [start() for _ in range(2)]
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        bad, good = _in_order(client, engines)
        bad.healthy = False
        bad.replies.append(Reply(error=Canned(b"{}", 500)))
        assert client.post(_CHAT, json=_HI).status_code == 500
        assert sorted(_states(client)) == [False, True]
        again = client.post(_CHAT, json=_HI)
        assert (again.status_code, again.json()["error"]["code"]) == (502, "engine_died")
        assert _generations(good) == 0
        assert client.post(_CHAT, json=_OTHER).status_code == 200


def test_request_alone_on_an_engine_that_died_in_its_stream_is_not_run_again(
    start: Callable[..., FakeVllm],
) -> None:
    engines = [start() for _ in range(2)]
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        bad, good = _in_order(client, engines)
        bad.replies.append(Reply(hold_at=2))
        body = {**_HI, "stream": True}
        with client.stream("POST", _CHAT, json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            bad.kill()
            assert b'"error"' in b"".join(chunks)
        again = client.post(_CHAT, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (502, "engine_died")
        assert _generations(good) == 0
        assert client.post(_CHAT, json={**_OTHER, "stream": True}).status_code == 200


def test_no_request_is_run_again_on_a_replica_that_was_drained_meanwhile(
    start: Callable[..., FakeVllm],
) -> None:
    engines = [start() for _ in range(3)]
    answers: list[int] = []
    with run_proxy(engines, policy="round_robin") as client:
        bad, drained, good = _in_order(client, engines)
        bad.replies.append(Reply(hold_at=0, break_at=0, how="head"))
        thread = threading.Thread(target=lambda: answers.append(client.post(_CHAT, json=_HI).status_code))
        thread.start()
        wait_until(lambda: bad.running == 1)
        assert client.post(f"{_ADMIN}/drain", json={"url": drained.url}).status_code == 200
        bad.release()
        thread.join()
        assert answers == [200]
    assert [_generations(engine) for engine in (bad, drained, good)] == [1, 0, 1]


def test_requests_that_hang_on_a_removed_replica_run_elsewhere(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is gone breaks no connections; after its removal it is still watched."""
    monkeypatch.setattr("proxy.fleet.replica.HEALTH_TIMEOUT_S", 0.1)
    monkeypatch.setattr("proxy.fleet.replica.RETRY_S", 0.05)
    engines = [start() for _ in range(2)]
    answers: list[int] = []
    with run_proxy(engines, policy="round_robin", watch_interval_s=0.1) as client:
        gone, good = _in_order(client, engines)
        gone.replies.append(Reply(hold_at=0))
        thread = threading.Thread(target=lambda: answers.append(client.post(_CHAT, json=_HI).status_code))
        thread.start()
        wait_until(lambda: gone.running == 1)
        assert client.delete(_ADMIN, params={"url": gone.url}).status_code == 200
        assert f'replica="{gone.url}"' in client.get("/metrics").text
        gone.slow_s["/health"] = _NEVER_S
        thread.join(20)
        assert answers == [200]
        wait_until(lambda: gone.url not in client.get("/metrics").text)
    assert [_generations(engine) for engine in (gone, good)] == [1, 1]


def test_request_that_was_not_sent_is_not_suspected(start: Callable[..., FakeVllm]) -> None:
    """Something else may accept connections at the address of an engine that is gone."""
    engines = [start(), start()]
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        gone, good = _in_order(client, engines)
        gone.hang_up = lambda seen: True
        gone.close_idle()
        for _ in range(2):
            assert client.post(_CHAT, json=_HI).status_code == 200
        assert (_generations(gone), _generations(good)) == (0, 2)


def test_get_under_which_an_engine_died_runs_again(start: Callable[..., FakeVllm]) -> None:
    engines = [start(), start()]
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        dying, _ = _in_order(client, engines)
        dying.healthy = False
        dying.hang_up = lambda seen: seen.path == "/version"
        assert [client.get("/version").status_code for _ in range(3)] == [200] * 3
        assert sorted(_states(client)) == [False, True]


def test_requests_on_an_engine_that_dies_soon_after_an_error_are_not_suspected(
    start: Callable[..., FakeVllm],
) -> None:
    """The error broke one request that ran alone; the death broke several."""
    engines = [start(), start()]
    answers: list[int] = []
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        dying, good = _in_order(client, engines)
        dying.replies.append(Reply(error=Canned(b"{}", 500)))
        assert client.post(_CHAT, json=_HI).status_code == 200
        dying.usual = Reply(hold_at=0)

        def ask(number: int) -> None:
            body = {"messages": [{"role": "user", "content": f"Hi {number}"}]}
            answers.append(client.post(_CHAT, json=body).status_code)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: dying.running >= 2 and len(answers) + dying.running == 6)
        dying.kill()
        for thread in threads:
            thread.join()
    assert answers == [200] * 6
    assert _generations(good) == 7


def test_requests_that_hang_on_a_machine_that_was_marked_down_run_elsewhere(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request broke and marked it down, before health checks missed."""
    for name, seconds in [("HEALTH_TIMEOUT_S", 0.2), ("CONFIRM_TIMEOUT_S", 0.1), ("RETRY_S", 0.05)]:
        monkeypatch.setattr(f"proxy.fleet.replica.{name}", seconds)
    engines = [start(), start()]
    answers: list[int] = []
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client:
        gone, good = _in_order(client, engines)
        gone.replies.append(Reply(hold_at=0))
        thread = threading.Thread(target=lambda: answers.append(client.post(_CHAT, json=_HI).status_code))
        thread.start()
        wait_until(lambda: gone.running == 1)
        gone.slow_s["/health"] = _NEVER_S
        gone.replies.append(Reply(break_at=0, how="head"))
        assert [client.post(_CHAT, json=_OTHER).status_code for _ in range(2)] == [200, 200]
        thread.join(20)
        assert answers == [200]
        assert _generations(good) == 3


def test_trial_of_a_long_completion_does_not_keep_the_replica_from_others(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica answers the request for one token meanwhile."""
    monkeypatch.setattr("proxy.fleet.silence.SILENT_S", 0.2)
    monkeypatch.setattr("proxy.fleet.silence.INTERVAL_S", 0.05)
    monkeypatch.setattr("proxy.fleet.health.FIRST_OPEN_S", 0.3)
    engines = [start(), start()]
    with run_proxy(engines, policy="round_robin", watch_interval_s=_NEVER_S) as client, ExitStack() as stack:
        bad, _ = _in_order(client, engines)
        position = engines.index(bad)

        def state() -> str:
            return str(client.get("/ready").json()["engines"][position]["breaker"])

        bad.usual = Reply(error=Canned(b"{}", 500))
        while state() == "closed":
            assert client.post(_CHAT, json=_HI).status_code == 200
        bad.usual = Reply()
        bad.replies.append(Reply(hold_at=0))
        wait_until(lambda: state() == "half_open")
        while not bad.running:
            stack.enter_context(send_and_keep(client.base_url, _CHAT, json.dumps(_HI).encode()))
            time.sleep(0.05)
        wait_until(lambda: state() == "closed")
        assert bad.running == 1
        bad.release()
