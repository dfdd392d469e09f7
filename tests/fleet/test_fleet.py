import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from proxy.engine.discovery import discover
from proxy.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable
from proxy.fleet.fleet import Fleet
from proxy.http import BytesResponse, Response
from proxy.settings import Settings
from tests.fake_vllm import Canned, FakeVllm, Reply, Variant
from tests.tiny_model import TinyModel
from tests.utils import run_app, run_proxy, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_IDS = {"prompt_ids": [1, 74]}
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_NEVER_S = 60


@pytest.fixture(autouse=True)
def come_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.fleet.replica.RETRY_S", 0.05)


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    """Starts engines, on a port of the test's choice where one comes back."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(FakeVllm(tiny_model, *args, **kwargs))


def _state(client: httpx.Client) -> list[str]:
    """Each engine's spelling, or `down`."""
    engines = client.get("/ready").json()["engines"]
    return [str(engine["token_in"]) if engine["ready"] else "down" for engine in engines]


def _asked(engine: FakeVllm) -> int:
    """How many generations it was asked for, probes left out."""
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def test_engines_are_taken_in_turn(start: Callable[..., FakeVllm]) -> None:
    engines = [start() for _ in range(3)]
    with run_proxy(engines) as client:
        for _ in range(3):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
            assert client.post(_CHAT, json=_HI).status_code == 200
    assert [_asked(engine) for engine in engines] == [2, 2, 2]


def test_a_dead_engine_is_passed_over(start: Callable[..., FakeVllm]) -> None:
    dead, alive = start(), start()
    with run_proxy([dead, alive], watch_interval_s=_NEVER_S) as client:
        dead.kill()
        for _ in range(4):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert _state(client) == ["down", "chat"]
    assert _asked(alive) == 4


def test_it_may_come_back_as_another(start: Callable[..., FakeVllm]) -> None:
    """A replica is asked anew: another version with other flags may have come in its place."""
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
    assert (len(first.seen("/inference/v1/generate")), _asked(second)) == (probe_and_request, 1)


def test_no_engine_is_left(start: Callable[..., FakeVllm]) -> None:
    engines = [start(), start()]
    with run_proxy(engines, watch_interval_s=_NEVER_S) as client:
        for engine in engines:
            engine.kill()
        for path, body in [(_TOKENS, _IDS), (_CHAT, _HI), (_TOKENS, {**_IDS, "stream": True})]:
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert _state(client) == ["down", "down"]


def test_all_engines_die_under_load(start: Callable[..., FakeVllm]) -> None:
    """Requests that find out at once do not trip over each other."""
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


def test_no_engine_from_the_start() -> None:
    with run_app(Settings(upstreams=["http://127.0.0.1:9", "http://127.0.0.1:9"])) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 503


def test_a_request_that_comes_before_the_engine_was_asked_waits(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    engine.slow_s["/health"] = 0.3
    with run_app(Settings(upstreams=["http://127.0.0.1:9", engine.url])) as client:
        assert client.post(_TOKENS, json=_IDS).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_takes_ids(start: Callable[..., FakeVllm], stream: bool) -> None:
    engines = [start(Variant.NEITHER), start(Variant.NEITHER)]
    with run_proxy(engines) as client:
        refused = client.post(_TOKENS, json={**_IDS, "stream": stream})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "no_token_in")
        assert client.post(_CHAT, json=_HI).status_code == 200


def test_only_engines_that_take_ids_get_them(start: Callable[..., FakeVllm]) -> None:
    without, with_ids = start(Variant.NEITHER), start()
    with run_proxy([without, with_ids]) as client:
        for _ in range(4):
            assert client.post(_TOKENS, json=_IDS).json()["prompt_token_ids"] == [1, 74]
        assert (_asked(without), _asked(with_ids)) == (0, 4)
        for _ in range(4):
            client.post(_CHAT, json=_HI)
    assert _asked(without) == 2


@pytest.mark.parametrize("wanted, found", [("chat", ["chat", "None"]), ("generate", ["None", "generate"])])
def test_a_spelling_may_be_forced(start: Callable[..., FakeVllm], wanted: str, found: list[str]) -> None:
    with run_proxy([start(Variant.CHAT), start(Variant.SCALE_OUT)], token_in=wanted) as client:
        assert _state(client) == found


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_answer_is_an_answer(start: Callable[..., FakeVllm], status: int) -> None:
    """Errors of an engine are the client's to see; they do not travel to the next one."""
    engines = [start(), start()]
    with run_proxy(engines) as client:
        for engine in engines:
            engine.replies.append(Reply(error=Canned(b"{}", status)))
        assert client.post(_CHAT, json=_HI).status_code == status
        assert sum(_asked(engine) for engine in engines) == 1
        assert _state(client) == ["chat", "chat"]


def test_an_engine_that_breaks_is_looked_at_at_once(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], watch_interval_s=_NEVER_S) as client:
        engine.healthy = False
        assert client.post(_CHAT, json=_HI).status_code == 200
        engine.hang_up = lambda seen: seen.method == "POST"
        assert client.post(_CHAT, json=_HI).status_code == 502
        wait_until(lambda: _state(client) == ["down"])
        assert "/health" in client.get("/ready").json()["engines"][0]["problem"]


def test_engines_are_watched(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    with run_proxy([engine], watch_interval_s=0.02) as client:
        engine.healthy = False
        wait_until(lambda: client.get("/ready").status_code == 503)
        engine.healthy = True
        wait_until(lambda: client.get("/ready").status_code == 200)


def test_an_engine_that_hangs_is_down(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.replica.HEALTH_TIMEOUT_S", 0.1)
    engine = start()
    with run_proxy([engine], watch_interval_s=0.02) as client:
        engine.slow_s["/health"] = _NEVER_S
        wait_until(lambda: _state(client) == ["down"])
        engine.slow_s.clear()
        wait_until(lambda: _state(client) == ["chat"])


def test_an_engine_that_does_not_finish_answering(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.fleet.replica.DISCOVERY_TIMEOUT_S", 0.1)
    engine = start()
    engine.slow_s["/v1/models"] = _NEVER_S
    with run_app(Settings(upstreams=[engine.url])) as client:
        wait_until(lambda: "did not answer within" in client.get("/ready").text)
        engine.slow_s.clear()
        wait_until(lambda: _state(client) == ["chat"])


def test_what_nobody_expected_does_not_end_the_watch(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("proxy.fleet.replica.discover", fail)
    with run_app(Settings(upstreams=[start().url])) as client:
        wait_until(lambda: "RuntimeError: unexpected" in client.get("/ready").text)
        monkeypatch.setattr("proxy.fleet.replica.discover", discover)
        wait_until(lambda: _state(client) == ["chat"])


def test_an_engine_in_trouble_is_asked_again(start: Callable[..., FakeVllm]) -> None:
    engine = start()
    engine.canned[_CHAT] = Canned(b"", 500)
    with run_app(Settings(upstreams=[engine.url])) as client:
        wait_until(lambda: "asking again later" in client.get("/ready").text)
        engine.canned.clear()
        wait_until(lambda: _state(client) == ["chat"])


class _Stub:
    """A replica whose work always ends in the same way."""

    ready = True
    capabilities = None

    def __init__(self, outcome: ApiError | None) -> None:
        self.outcome = outcome
        self.marks: list[str] = []

    def mark_down(self, problem: ApiError) -> None:
        self.marks.append("down")

    def suspect(self) -> None:
        self.marks.append("suspect")

    def report(self) -> dict[str, Any]:
        return {"problem": "stub"}

    async def asked(self) -> None:
        await asyncio.Event().wait()


async def _work(replica: Any) -> Response:
    if replica.outcome is not None:
        raise replica.outcome
    return BytesResponse(200, [], b"")


@pytest.mark.parametrize(
    "first, marked, passed_over",
    [
        (EngineUnavailable("gone"), "down", True),
        (EngineTimeout("slow"), "suspect", True),
        (EngineBroken("broken"), "suspect", False),
    ],
)
async def test_only_what_never_arrived_goes_to_another(
    first: ApiError, marked: str, passed_over: bool
) -> None:
    replicas: Any = [_Stub(None), _Stub(first)]
    fleet = Fleet(replicas)
    if passed_over:
        assert (await fleet.on_replica(_work)).status == 200
    else:
        with pytest.raises(type(first)):
            await fleet.on_replica(_work)
    assert [replica.marks for replica in replicas] == [[], [marked]]


async def test_when_all_are_slow_it_is_a_timeout() -> None:
    replicas: Any = [_Stub(EngineTimeout("slow")), _Stub(EngineUnavailable("gone"))]
    with pytest.raises(EngineTimeout):
        await Fleet(replicas).on_replica(_work)


async def test_waiting_for_a_first_answer_has_an_end() -> None:
    replicas: Any = [_Stub(None)]
    replicas[0].ready = False
    await asyncio.wait_for(Fleet(replicas).wait_asked(0.01), 5)
