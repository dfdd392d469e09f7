"""Clients that leave: the engine stops sampling for them, and they are counted."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from proxy.app import create_app
from proxy.settings import Settings
from proxy.stores.memory import MemoryStore
from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.scraping import Scrape, grown
from tests.support.utils import run_server, send_and_keep, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
_IDS: dict[str, Any] = {"prompt_ids": [1, 74]}


def _await_counted(client: httpx.Client, before: Scrape, path: str, status: str) -> None:
    wait_until(lambda: grown(before, Scrape(client), "client_disconnects_total", route=path))
    wait_until(lambda: Scrape(client).value("requests_in_flight") == 0)
    wait_until(lambda: Scrape(client).value("replica_requests_in_flight") == 0)
    assert grown(before, Scrape(client), "requests_total", route=path, status=status) == 1


@pytest.mark.parametrize(
    ("pair", "path", "body"),
    [(Variant.CHAT, _TOKENS, _IDS), (Variant.SCALE_OUT, _TOKENS, _IDS), (Variant.CHAT, _CHAT, _HI)],
    indirect=["pair"],
)
@pytest.mark.parametrize(
    ("hold_at", "stream", "status"), [(0, False, "499"), (0, True, "499"), (1, True, "200")]
)
def test_a_client_that_leaves_before_or_inside_the_answer(
    fake: FakeVllm,
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    hold_at: int,
    stream: bool,
    status: str,
) -> None:
    before = Scrape(client)
    fake.replies.append(Reply(hold_at=hold_at))
    with send_and_keep(client.base_url, path, json.dumps({**body, "stream": stream}).encode()) as connection:
        wait_until(lambda: fake.running)
        if hold_at:
            assert connection.recv(1)  # the head, which comes with the first event
        assert (fake.running, fake.aborted) == (1, 0)
    wait_until(lambda: (fake.running, fake.aborted) == (0, 1))
    _await_counted(client, before, path, status)
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
    body = json.dumps({**_HI, "stream": True}).encode()
    with run_server(create_app(Settings(upstreams=[fake.url], store="memory:"))) as url:
        with send_and_keep(httpx.URL(url), _CHAT, body):
            wait_until(lambda: reached)
            assert (fake.running, fake.aborted) == (1, 0)
        wait_until(lambda: (fake.running, fake.aborted) == (0, 1))


def test_a_client_that_leaves_while_it_sends(fake: FakeVllm, client: httpx.Client) -> None:
    before, body = Scrape(client), json.dumps(_IDS).encode()
    with send_and_keep(client.base_url, _TOKENS, body, announced=len(body) + 1):
        wait_until(lambda: Scrape(client).value("requests_in_flight") == 1)
    _await_counted(client, before, _TOKENS, "499")
    assert fake.seen(_CHAT) == []
