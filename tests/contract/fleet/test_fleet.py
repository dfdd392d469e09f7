"""A fleet of engines on sockets: what the fleet's own tests, whose engines have none, cannot show."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_IDS = {"prompt_ids": [1, 74]}
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_NEVER_S = 60.0


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    """Starts fake engines; a given port restarts one."""
    with ExitStack() as stack:

        def make(variant: Variant = Variant.CHAT, port: int = 0, names: tuple[str, ...] = ()) -> FakeVllm:
            engine = FakeVllm(tiny_model, variant, port=port)
            engine.names = list(names) or engine.names
            return stack.enter_context(engine)

        yield make


def _state(client: httpx.Client) -> list[str]:
    """For each engine its way to take ids, or `down`."""
    engines = client.get("/ready").json()["engines"]
    return [str(engine["token_in"]) if engine["ready"] else "down" for engine in engines]


def _sent(engine: FakeVllm) -> int:
    """Number of completions of clients that the engine got."""
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def test_engines_die_and_come_back_as_others(start: Callable[..., FakeVllm]) -> None:
    first, second = start(), start()
    with run_proxy([first, second]) as client:
        assert _state(client) == ["chat", "chat"]
        first.kill()
        second.kill()
        for path, body in [(_TOKENS, _IDS), (_CHAT, _HI), (_TOKENS, {**_IDS, "stream": True})]:
            response = client.post(path, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
        assert _state(client) == ["down", "down"]
        start(Variant.SCALE_OUT, port=first.port)
        wait_until(lambda: _state(client) == ["generate", "down"])
        start(Variant.SCALE_OUT, port=second.port)
        wait_until(lambda: _state(client) == ["generate", "generate"])
        assert client.post(_TOKENS, json=_IDS).json()["prompt_token_ids"] == [1, 74]


def test_no_ids_go_to_an_engine_that_came_back_with_another_model(start: Callable[..., FakeVllm]) -> None:
    """Between two health checks, and without a request that the restart broke."""
    first = start()
    with run_proxy([first], watch_interval_s=_NEVER_S) as client:
        asked = len(first.seen("/v1/models"))
        for _ in range(3):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        connections = sum(not seen.reused for seen in first.seen(_CHAT))
        assert len(first.seen("/v1/models")) <= asked + 1 + connections, "once for each connection"
        first.kill()
        same = start(port=first.port)
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert same.seen("/v1/models")
        same.kill()
        other = start(port=first.port, names=("other",))
        refused = client.post(_TOKENS, json=_IDS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "another model" in refused.json()["error"]["message"]
        assert _sent(other) == 0
        wait_until(
            lambda: [each.get("model") for each in client.get("/ready").json()["engines"]] == ["other"]
        )
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert _sent(other) == 1
