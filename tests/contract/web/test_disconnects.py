"""Clients that leave: the engine stops sampling for them, they are counted, and nothing of them stays."""

import asyncio
import gc
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.scraping import Scrape, grown
from tests.support.utils import send_and_keep, wait_until

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
@pytest.mark.parametrize(("hold_at", "stream"), [(0, False), (0, True), (1, True)])
def test_a_client_that_leaves_before_or_inside_the_answer(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, Any], hold_at: int, stream: bool
) -> None:
    before = Scrape(client)
    fake.replies.append(Reply(hold_at=hold_at))
    with send_and_keep(client.base_url, path, json.dumps({**body, "stream": stream}).encode()) as connection:
        wait_until(lambda: fake.running)
        if hold_at:
            assert connection.recv(1)  # the head, which comes with the first event
        assert (fake.running, fake.aborted) == (1, 0)
    wait_until(lambda: (fake.running, fake.aborted) == (0, 1))
    _await_counted(client, before, path, "200" if hold_at else "499")
    assert client.post(path, json=body).status_code == 200


def test_a_client_that_leaves_while_it_sends(fake: FakeVllm, client: httpx.Client) -> None:
    before, body = Scrape(client), json.dumps(_IDS).encode()
    with send_and_keep(client.base_url, _TOKENS, body, announced=len(body) + 1):
        wait_until(lambda: Scrape(client).value("requests_in_flight") == 1)
    _await_counted(client, before, _TOKENS, "499")
    assert fake.seen(_CHAT) == []


def _tasks() -> int:
    """Unfinished tasks of all event loops of this process: the proxy's and the engine's."""
    gc.collect()
    return sum(isinstance(found, asyncio.Task) and not found.done() for found in gc.get_objects())


@pytest.mark.parametrize("hold_at", [0, 1])
@pytest.mark.parametrize("path, body", [(_TOKENS, _IDS), (_CHAT, _HI)])
def test_many_clients_that_leave_together(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, Any], hold_at: int
) -> None:
    assert client.post(path, json=body).status_code == 200
    tasks, count = _tasks(), 50
    fake.replies.extend([Reply(hold_at=hold_at)] * count)
    with ExitStack() as clients:
        for _ in range(count):
            sent = json.dumps({**body, "stream": bool(hold_at)}).encode()
            clients.enter_context(send_and_keep(client.base_url, path, sent))
        wait_until(lambda: fake.running == count)
    wait_until(lambda: (fake.running, fake.aborted) == (0, count))
    wait_until(lambda: _tasks() <= tasks + 5)  # health checks, idle connections; a leak is fifty
    wait_until(lambda: Scrape(client).value("requests_in_flight") == 0)
