"""Clients that many threads or tasks use at the same time."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import pytest

from proxy.client import Client
from tests.contract.client.blocking import BlockingClient

_AT_ONCE = 110
"""More than the 100 requests that httpx sends at once by default."""
_MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n" + b'{"data": []}'


@contextmanager
def _serve() -> Iterator[str]:
    """A server that responds to no request before all of them are there."""
    loop, all_there = asyncio.new_event_loop(), asyncio.Barrier(_AT_ONCE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            await all_there.wait()
            writer.write(_MODELS)
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0, backlog=_AT_ONCE))
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()


@pytest.mark.parametrize("make", [Client, BlockingClient], ids=["blocking", "asyncio"])
def test_no_request_waits_for_another(make: Callable[..., Any]) -> None:
    with _serve() as url, make(url) as client, ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in range(2):  # the second time on the connections of the first
            found = [threads.submit(client.models) for _ in range(_AT_ONCE)]
            assert [each.result() for each in found] == [[]] * _AT_ONCE
