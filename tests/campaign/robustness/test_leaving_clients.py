"""Clients that leave: the engine's work for them is aborted, and nothing of them stays."""

import asyncio
import gc
import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_CHAT, _TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
_HI = [{"role": "user", "content": "Hi"}]
_STAGES = ("sends its body", "sent its body", "waits for the response", "reads a stream")
_EACH, _AT_ONCE = 500, 100


@pytest.fixture
def served(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, httpx.Client]]:
    with FakeVllm(tiny_model) as engine, run_proxy([engine], store="memory:", watch_interval_s=5.0) as client:
        yield engine, client


def _tasks() -> int:
    """Unfinished tasks of all event loops of this process: the proxy's and the engine's."""
    gc.collect()
    return sum(isinstance(found, asyncio.Task) and not found.done() for found in gc.get_objects())


def _in_flight(client: httpx.Client) -> dict[str, float]:
    """Gauges of what runs or waits that are not zero."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    words = ("running", "waiting", "in_flight", "queued", "active", "pending")
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in families
        if family.type == "gauge" and any(word in family.name for word in words)
        for sample in family.samples
        if sample.value and "/metrics" not in sample.labels.values()
    }


async def _leave(address: tuple[str, int], stage: str, path: str, all_wait: asyncio.Event) -> None:
    """One client, up to the moment when it leaves: for its response, together with all others."""
    fields = {"messages": _HI} if path == _CHAT else {"prompt_ids": [1, 74]}
    body = json.dumps({**fields, "stream": stage != "waits for the response"}).encode()
    reader, writer = await asyncio.open_connection(*address)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + (body[:-1] if stage == "sends its body" else body))
        await writer.drain()
        if stage == "waits for the response":
            await all_wait.wait()
        elif stage == "reads a stream":
            await reader.readuntil(b"data: ")
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("stage", _STAGES)
def test_clients_that_leave(served: tuple[FakeVllm, httpx.Client], stage: str) -> None:
    engine, client = served
    address = (client.base_url.host, client.base_url.port or 80)
    assert client.post(_CHAT, json={"messages": _HI}).is_success
    tasks, before = _tasks(), len(engine.seen(_CHAT))

    async def leave_all() -> None:
        async with asyncio.timeout(120):
            for _ in range(_EACH // _AT_ONCE):
                engine.replies.extend([Reply(hold_at=1 if stage == "reads a stream" else 0)] * _AT_ONCE)
                paths = [(_CHAT, _TOKENS)[number % 2] for number in range(_AT_ONCE)]
                all_wait = asyncio.Event()
                clients = [asyncio.create_task(_leave(address, stage, path, all_wait)) for path in paths]
                if stage == "waits for the response":
                    await asyncio.to_thread(wait_until, lambda: engine.running == _AT_ONCE)
                    all_wait.set()
                await asyncio.gather(*clients)
                await asyncio.to_thread(wait_until, lambda: not engine.running and not _in_flight(client))
                engine.replies.clear()

    asyncio.run(leave_all())
    # a request may reach the engine after its client has gone. Nothing that is held is ever released: what
    # runs no more was aborted
    wait_until(lambda: _tasks() <= tasks + 5)  # health checks, idle connections; a leak is hundreds
    wait_until(lambda: not engine.running)
    generations = len(engine.seen(_CHAT)) - before
    if stage in ("waits for the response", "reads a stream"):
        assert engine.aborted == generations == _EACH
    elif stage == "sends its body":
        assert generations == 0
    wait_until(lambda: not _in_flight(client))
    assert client.post(_CHAT, json={"messages": _HI}).is_success
