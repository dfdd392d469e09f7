import asyncio
import json
from typing import Any

import httpx
import pytest

from proxy.app import create_app
from proxy.settings import Settings
from proxy.stores.memory import MemoryStore
from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.utils import run_server, send_and_keep, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_HI = [{"role": "user", "content": "Hi"}]
_REQUESTS: dict[str, tuple[Variant, str, dict[str, Any]]] = {
    "tokens, chat": (Variant.CHAT, _TOKENS, {"prompt_ids": [1, 74]}),
    "tokens, generate": (Variant.SCALE_OUT, _TOKENS, {"prompt_ids": [1, 74]}),
    "first turn": (Variant.CHAT, _TOKENS, {"messages": _HI}),
    "passed through": (Variant.CHAT, _CHAT, {"messages": _HI}),
}
_EVERY_REQUEST = pytest.mark.parametrize(
    "pair, path, body", _REQUESTS.values(), ids=_REQUESTS, indirect=["pair"]
)


@_EVERY_REQUEST
def test_a_client_that_leaves_a_stream(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    fake.replies.append(Reply(hold_at=1))
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        chunks = answer.iter_raw()
        assert next(chunks).startswith(b"data: {")
        assert (fake.running, fake.aborted) == (1, 0)
    wait_until(lambda: (fake.running, fake.aborted) == (0, 1))
    assert client.post(path, json=body).status_code == 200


@_EVERY_REQUEST
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_answer(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    fake.replies.append(Reply(hold_at=0))
    with send_and_keep(client.base_url, path, json.dumps({**body, "stream": stream}).encode()):
        wait_until(lambda: fake.running)
        assert fake.aborted == 0
    wait_until(lambda: (fake.running, fake.aborted) == (0, 1))
    assert client.post(path, json=body).status_code == 200


def test_a_client_that_leaves_while_the_store_is_slow(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has begun to respond, but nobody reads that response yet."""
    reached: list[str] = []

    async def never_saved(store: MemoryStore, *_: object) -> None:
        reached.append("save_session")
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryStore, "save_session", never_saved)
    fake.replies.append(Reply(hold_at=1))
    body = json.dumps({"messages": _HI, "stream": True}).encode()
    with run_server(create_app(Settings(upstreams=[fake.url], store="memory:"))) as url:
        with send_and_keep(httpx.URL(url), _CHAT, body):
            wait_until(lambda: reached)
            assert (fake.running, fake.aborted) == (1, 0)
        wait_until(lambda: (fake.running, fake.aborted) == (0, 1))


def test_completed_request_is_not_aborted(fake: FakeVllm, client: httpx.Client) -> None:
    for stream in (False, True):
        client.post(_TOKENS, json={"prompt_ids": [1, 74], "stream": stream})
    wait_until(lambda: not fake.running)
    assert fake.aborted == 0


def test_a_client_that_leaves_while_it_sends(fake: FakeVllm, client: httpx.Client) -> None:
    body = json.dumps({"prompt_ids": [1, 74]}).encode()
    with send_and_keep(client.base_url, _TOKENS, body, announced=len(body) + 1):
        pass
    assert client.post(_TOKENS, content=body).status_code == 200
    assert len(fake.seen(_CHAT)) == 1
