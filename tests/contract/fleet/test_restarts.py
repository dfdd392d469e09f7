"""Engines that come back as another one, and engines that answer nothing."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_IDS = {"prompt_ids": [1, 74]}
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_NEVER_S = 60.0


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    """Starts fake engines; attributes are set before they listen."""
    with ExitStack() as stack:

        def make(port: int = 0, **attributes: object) -> FakeVllm:
            engine = FakeVllm(tiny_model, port=port)
            for name, value in attributes.items():
                setattr(engine, name, value)
            return stack.enter_context(engine)

        yield make


def _sent_ids(engine: FakeVllm) -> list[object]:
    """Prompt ids of clients that an engine got."""
    bodies = [seen.json for seen in engine.seen(_CHAT)]
    return [body["kv_transfer_params"] for body in bodies if body.get("max_tokens") != 1]


def _models(client: httpx.Client) -> list[object]:
    return [engine.get("model") for engine in client.get("/ready").json()["engines"]]


def _breaker(client: httpx.Client) -> str:
    """The state of the first replica's breaker."""
    return str(client.get("/ready").json()["engines"][0]["breaker"])


def test_no_ids_go_to_an_engine_that_came_back_with_another_model(start: Callable[..., FakeVllm]) -> None:
    """Between two health checks, and without a request that the restart broke."""
    first = start()
    with run_proxy([first], watch_interval_s=_NEVER_S) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        first.kill()
        second = start(first.port, names=["other"])
        refused = client.post(_TOKENS, json=_IDS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "another model" in refused.json()["error"]["message"]
        assert _sent_ids(second) == []
        wait_until(lambda: _models(client) == ["other"])
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert len(_sent_ids(second)) == 1


def test_the_request_goes_to_another_replica(start: Callable[..., FakeVllm]) -> None:
    first, stays = start(), start()
    with run_proxy([first, stays], watch_interval_s=_NEVER_S, policy="round_robin") as client:
        first.kill()
        second = start(first.port, root="/elsewhere")
        for _ in range(4):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert _sent_ids(second) == []
        assert len(_sent_ids(stays)) == 4


def test_an_engine_that_came_back_the_same_serves_at_once(start: Callable[..., FakeVllm]) -> None:
    first = start()
    with run_proxy([first], watch_interval_s=_NEVER_S) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        first.kill()
        second = start(first.port)
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert second.seen("/v1/models")


def test_the_model_is_verified_once_for_each_connection(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], watch_interval_s=_NEVER_S) as client:
        seen_before = len(engine.seen("/v1/models"))
        for _ in range(5):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        connections = sum(not seen.reused for seen in engine.seen(_CHAT))
        assert len(engine.seen("/v1/models")) <= seen_before + 1 + connections


def test_a_silent_replica_is_ejected_and_its_requests_go_elsewhere(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.silence.SILENT_S", 0.3)
    monkeypatch.setattr("proxy.fleet.silence.PROBE_S", 0.3)
    monkeypatch.setattr("proxy.fleet.silence.INTERVAL_S", 0.05)
    silent, good = start(), start()
    with run_proxy([silent, good], watch_interval_s=_NEVER_S, policy="round_robin") as client:
        for _ in range(4):
            assert client.post(_CHAT, json=_HI).status_code == 200
        silent.slow_s[_CHAT] = _NEVER_S
        for _ in range(4):
            assert client.post(_CHAT, json=_HI).status_code == 200
        (report, _) = client.get("/ready").json()["engines"]
        assert (report["ready"], report["breaker"]) == (True, "open")
        assert "no requests" in report["problem"]


def test_a_trial_that_just_began_is_not_decided_by_a_probe(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although an earlier request has waited for long, so that the replica looks silent."""
    monkeypatch.setattr("proxy.fleet.health.FIRST_OPEN_S", 3.5)
    stream = json.dumps({**_HI, "stream": True}).encode()
    bad, good = start(usual=Reply(pause_s=_NEVER_S)), start()
    proxy = run_proxy([bad, good], watch_interval_s=_NEVER_S, policy="round_robin")
    with proxy as client, ExitStack() as stack:

        def send_stream() -> int:
            """Send a request that is answered at once by the good replica only; returns how many wait."""
            stack.enter_context(send_and_keep(client.base_url, _CHAT, stream))
            time.sleep(0.03)
            return bad.running

        wait_until(lambda: send_stream() == 1)
        bad.hang_up = lambda seen: seen.path == _CHAT
        for _ in range(6):
            assert client.post(_CHAT, json=_HI).status_code == 200
        bad.hang_up = lambda seen: False
        assert _breaker(client) == "open"
        wait_until(lambda: send_stream() == 2)
        for _ in range(30):
            assert send_stream() == 2
        assert _breaker(client) == "half_open"


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_whose_first_responses_take_long(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    """All were just started: the request moves once, and then waits for as long as it takes."""
    monkeypatch.setattr("proxy.fleet.health.FIRST_OPEN_S", 0.2)
    monkeypatch.setattr("proxy.fleet.silence.SILENT_S", 0.3)
    monkeypatch.setattr("proxy.fleet.silence.PROBE_S", 0.3)
    monkeypatch.setattr("proxy.fleet.silence.INTERVAL_S", 0.05)
    engines = [start() for _ in range(replicas)]
    with run_proxy(engines, watch_interval_s=_NEVER_S) as client:
        for engine in engines:
            engine.slow_s[_CHAT] = 3.0
        assert client.post(_CHAT, json=_HI).status_code == 200
        assert 'reason="silent"' in client.get("/metrics").text


def test_a_slow_replica_is_not_silent(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the request for one token, so the long generation is not ended."""
    monkeypatch.setattr("proxy.fleet.silence.SILENT_S", 0.2)
    monkeypatch.setattr("proxy.fleet.silence.INTERVAL_S", 0.05)
    slow, other = start(), start()
    with run_proxy([slow, other], watch_interval_s=_NEVER_S) as client:
        for engine in (slow, other):
            engine.usual = Reply(pause_s=1.0)
        before = sum(len(engine.seen(_CHAT)) for engine in (slow, other))
        assert client.post(_CHAT, json={**_HI, "stream": True}).status_code == 200
        probes = sum(len(engine.seen(_CHAT)) for engine in (slow, other)) - before - 1
        assert probes >= 1
        reports = client.get("/ready").json()["engines"]
        assert [report["breaker"] for report in reports] == ["closed", "closed"]
