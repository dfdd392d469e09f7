"""Requests that an engine refuses because it is paused wait for its resumption, and are sent again.

Somebody else paused it: where the proxy itself did, requests wait before they are sent.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.fake_trained import FakeTrained, Rendezvous
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until
from tokenproxy.fleet import weights


@pytest.fixture
def engines(tiny_model: TinyModel) -> Iterator[list[FakeTrained]]:
    with FakeTrained(tiny_model, Rendezvous(1)) as one, FakeTrained(tiny_model, Rendezvous(1)) as other:
        one.refuses_while_paused = other.refuses_while_paused = True
        yield [one, other]


def _chat(client: httpx.Client, *, stream: bool = False) -> httpx.Response:
    body = {"messages": [user("in a pause")], "stream": stream}
    return client.post(CHAT, json=body, headers={"x-session-id": "paused"})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_refused_request_is_held_and_sent_again(engines: list[FakeTrained], stream: bool) -> None:
    engine = engines[0]
    with run_proxy([engine]) as client, ThreadPoolExecutor(1) as pool:
        engine.paused = "abort"
        answer = pool.submit(_chat, client, stream=stream)
        wait_until(lambda: engine.refused)
        wait_until(lambda: "tokenproxy_requests_queued 1.0" in client.get("/metrics").text)
        assert not answer.done()
        engine.paused = ""
        assert answer.result().status_code == 200
        assert b"Generation is paused" not in answer.result().content
        assert engine.refused == 1
        wait_until(lambda: client.get("/ready").json()["engines"][0]["requests"] == 0)
        assert client.get("/ready").json()["engines"][0]["breaker"] == "closed"


def test_another_replica_that_is_not_paused_runs_it(engines: list[FakeTrained]) -> None:
    with run_proxy(engines) as client:
        assert _chat(client).status_code == 200
        [holder] = [engine for engine in engines if engine.sampled["paused"]]
        holder.paused = "wait"
        assert _chat(client).status_code == 200
        assert holder.refused == 1
        assert [state["breaker"] for state in client.get("/ready").json()["engines"]] == ["closed"] * 2


def test_an_engine_that_does_not_tell_is_asked_again_with_the_request(
    engines: list[FakeTrained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SILENT_S", 0.02)
    monkeypatch.setattr(weights, "_RESUMED_TICK_S", 0.02)
    engine = engines[0]
    engine.refuses["/is_paused"] = 404
    with run_proxy([engine]) as client, ThreadPoolExecutor(1) as pool:
        engine.paused = "abort"
        answer = pool.submit(_chat, client)
        wait_until(lambda: engine.refused > 1)
        engine.paused = ""
        assert answer.result().status_code == 200


def test_a_pause_that_does_not_end_is_told_to_the_client(engines: list[FakeTrained]) -> None:
    engine = engines[0]
    with run_proxy([engine], weight_update_timeout_s=0.3) as client:
        engine.paused = "abort"
        answer = _chat(client)
    assert answer.status_code == 503
    assert "Generation is paused" in answer.text
