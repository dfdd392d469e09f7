import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from proxy.engine.discovery import discover
from proxy.settings import Settings
from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_IDS = {"prompt_ids": [1, 74]}
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_NEVER_S = 60


@pytest.fixture(autouse=True)
def short_retry_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.fleet.replica.RETRY_S", 0.05)


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    """Starts fake engines; a given port restarts one."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(FakeVllm(tiny_model, *args, **kwargs))


def _state(client: httpx.Client) -> list[str]:
    """For each engine its way to take ids, or `down`."""
    engines = client.get("/ready").json()["engines"]
    return [str(engine["token_in"]) if engine["ready"] else "down" for engine in engines]


def _generations(engine: FakeVllm) -> int:
    """Number of generation requests the engine got, without discovery."""
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def test_requests_are_distributed_round_robin(start: Callable[..., FakeVllm]) -> None:
    engines = [start() for _ in range(3)]
    with run_proxy(engines, policy="round_robin") as client:
        for _ in range(3):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
            assert client.post(_CHAT, json=_HI).status_code == 200
    assert [_generations(engine) for engine in engines] == [2, 2, 2]


def test_dead_engine_is_skipped(start: Callable[..., FakeVllm]) -> None:
    dead, alive = start(), start()
    with run_proxy([dead, alive], watch_interval_s=_NEVER_S) as client:
        dead.kill()
        for _ in range(4):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert _state(client) == ["down", "chat"]
    assert _generations(alive) == 4


def test_discovery_runs_again_after_an_outage(start: Callable[..., FakeVllm]) -> None:
    """The engine may have been restarted as another version or with other flags."""
    first, second = start(), start(Variant.NEITHER)
    with run_proxy([first, second]) as client:
        assert _state(client) == ["chat", "None"]
        for engine in (first, second):
            engine.kill()
        wait_until(lambda: _state(client) == ["down", "down"])
        first = start(Variant.SCALE_OUT, port=first.port)
        second = start(Variant.CHAT, port=second.port)
        wait_until(lambda: _state(client) == ["generate", "chat"])
        for _ in range(2):
            assert client.post(_TOKENS, json=_IDS).json()["prompt_token_ids"] == [1, 74]
    probe_and_request = 2
    assert (len(first.seen("/inference/v1/generate")), _generations(second)) == (probe_and_request, 1)


def test_requests_without_engine_are_503(start: Callable[..., FakeVllm]) -> None:
    engines = [start(), start()]
    with run_proxy(engines, watch_interval_s=_NEVER_S) as client:
        for engine in engines:
            engine.kill()
        for path, body in [(_TOKENS, _IDS), (_CHAT, _HI), (_TOKENS, {**_IDS, "stream": True})]:
            response = client.post(path, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
        assert _state(client) == ["down", "down"]


def test_concurrent_requests_to_dead_engines_are_503(start: Callable[..., FakeVllm]) -> None:
    """Many requests may detect the outage at the same time."""
    engines = [start() for _ in range(4)]
    with run_proxy(engines, watch_interval_s=_NEVER_S) as client:
        for engine in engines:
            engine.kill()
        statuses: list[int] = []
        body = {**_IDS, "append_messages": _HI["messages"]}
        threads = [
            threading.Thread(target=lambda: statuses.append(client.post(_TOKENS, json=body).status_code))
            for _ in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == [503] * 24


def test_engines_that_never_responded_are_503() -> None:
    with run_app(Settings(upstreams=["http://127.0.0.1:9", "http://127.0.0.1:9"])) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 503


def test_request_waits_for_the_first_discovery(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    engine.slow_s["/health"] = 0.3
    with run_app(Settings(upstreams=["http://127.0.0.1:9", engine.url])) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_unsupported_if_no_engine_takes_them(start: Callable[..., FakeVllm], stream: bool) -> None:
    engines = [start(Variant.NEITHER), start(Variant.NEITHER)]
    with run_proxy(engines) as client:
        refused = client.post(_TOKENS, json={**_IDS, "stream": stream})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "no_token_in")
        assert client.post(_CHAT, json=_HI).status_code == 200


def test_ids_are_sent_only_to_engines_that_take_them(start: Callable[..., FakeVllm]) -> None:
    without, with_ids = start(Variant.NEITHER), start()
    with run_proxy([without, with_ids], policy="round_robin") as client:
        for _ in range(4):
            assert client.post(_TOKENS, json=_IDS).json()["prompt_token_ids"] == [1, 74]
        assert (_generations(without), _generations(with_ids)) == (0, 4)
        for _ in range(4):
            client.post(_CHAT, json=_HI)
    assert _generations(without) == 2


@pytest.mark.parametrize("setting, found", [("chat", ["chat", "None"]), ("generate", ["None", "generate"])])
def test_spelling_setting_is_used(start: Callable[..., FakeVllm], setting: str, found: list[str]) -> None:
    with run_proxy([start(Variant.CHAT), start(Variant.SCALE_OUT)], token_in=setting) as client:
        assert _state(client) == found


@pytest.mark.parametrize("status", [400, 404, 429, 501])
def test_refusals_are_not_sent_elsewhere(start: Callable[..., FakeVllm], status: int) -> None:
    """The client gets the engine's error response; the request is not sent to another engine."""
    engines = [start(), start()]
    with run_proxy(engines) as client:
        for engine in engines:
            engine.replies.append(Reply(error=Canned(b"{}", status)))
        assert client.post(_CHAT, json=_HI).status_code == status
        assert sum(_generations(engine) for engine in engines) == 1
        assert _state(client) == ["chat", "chat"]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("stream", [False, True])
def test_server_errors_go_to_one_other_engine(
    start: Callable[..., FakeVllm], status: int, stream: bool
) -> None:
    bad, good = start(), start()
    with run_proxy([bad, good], policy="round_robin") as client:
        for _ in range(2):
            bad.replies.append(Reply(error=Canned(b"{}", status)))
            response = client.post(_CHAT, json={**_HI, "stream": stream})
            assert (response.status_code, response.headers["x-prompt-source"]) == (200, "rendered")
        bad.replies.clear()
        assert _generations(good) == 2


def test_a_server_error_of_two_engines_is_the_answer(start: Callable[..., FakeVllm]) -> None:
    """A third engine is not tried, and no replica is blamed: the request may be the cause."""
    engines = [start(), start(), start()]
    with run_proxy(engines) as client:
        for _ in range(4):
            for engine in engines:
                engine.replies.append(Reply(error=Canned(b'{"error": "no"}', 500)))
            response = client.post(_CHAT, json=_HI)
            assert (response.status_code, response.text) == (500, '{"error": "no"}')
            for engine in engines:
                engine.replies.clear()
        assert sum(_generations(engine) for engine in engines) == 8
        assert [engine["breaker"] for engine in client.get("/ready").json()["engines"]] == ["closed"] * 3


def test_broken_engine_is_checked_at_once(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], watch_interval_s=_NEVER_S) as client:
        engine.healthy = False
        assert client.post(_CHAT, json=_HI).status_code == 200
        engine.hang_up = lambda seen: seen.method == "POST"
        assert client.post(_CHAT, json=_HI).status_code == 502
        wait_until(lambda: _state(client) == ["down"])
        assert "/health" in client.get("/ready").json()["engines"][0]["problem"]


def test_health_is_checked_at_intervals(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], watch_interval_s=0.02) as client:
        engine.healthy = False
        wait_until(lambda: client.get("/ready").status_code == 503)
        engine.healthy = True
        wait_until(lambda: client.get("/ready").status_code == 200)


def test_engine_with_a_hanging_health_route_is_down(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.replica.HEALTH_TIMEOUT_S", 0.1)
    engine = start()
    with run_proxy([engine], watch_interval_s=0.02) as client:
        engine.slow_s["/health"] = _NEVER_S
        wait_until(lambda: _state(client) == ["down"])
        engine.slow_s.clear()
        wait_until(lambda: _state(client) == ["chat"])


def test_discovery_times_out_and_is_retried(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.replica.DISCOVERY_TIMEOUT_S", 0.1)
    engine = start()
    engine.slow_s["/v1/models"] = _NEVER_S
    with run_app(Settings(upstreams=[engine.url])) as client:
        wait_until(lambda: "did not respond within" in client.get("/ready").text)
        engine.slow_s.clear()
        wait_until(lambda: _state(client) == ["chat"])


def test_unexpected_errors_do_not_end_the_watch(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("proxy.fleet.replica.discover", fail)
    with run_app(Settings(upstreams=[start().url])) as client:
        wait_until(lambda: "RuntimeError: unexpected" in client.get("/ready").text)
        monkeypatch.setattr("proxy.fleet.replica.discover", discover)
        wait_until(lambda: _state(client) == ["chat"])


def test_failed_discovery_is_retried(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    engine.canned[_CHAT] = Canned(b"", 500)
    with run_app(Settings(upstreams=[engine.url])) as client:
        wait_until(lambda: "retrying later" in client.get("/ready").text)
        engine.canned.clear()
        wait_until(lambda: _state(client) == ["chat"])
