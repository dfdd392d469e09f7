"""Workers under load: only requests of a worker that is killed are lost, and no counter falls."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.scraping import Scrape
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, HI
from tests.support.utils import wait_until

_CLIENTS = 8


class _Load:
    """Clients that send requests over new connections, one after the other."""

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._served = asyncio.Semaphore(0)
        self._tasks = [asyncio.create_task(self._send()) for _ in range(_CLIENTS)]

    async def stop(self) -> None:
        """Wait for the last responses."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def until(self, count: int) -> None:
        """Wait for so many more requests that are served."""
        self._served = asyncio.Semaphore(0)
        for _ in range(count):
            await self._served.acquire()

    async def _send(self) -> None:
        body = {"messages": [user("Hi")]}
        while True:
            try:
                async with aiohttp.ClientSession(self._url) as http, http.post(CHAT, json=body) as response:
                    await response.read()
                    self.outcomes[str(response.status)] += 1
                    if response.status == 200:
                        self._served.release()
            except aiohttp.ClientError:
                self.outcomes["lost"] += 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_that_ends_is_replaced(
    mortal: FakeVllm, tmp_path: Path, number: signal.Signals
) -> None:
    mortal.replies.extend([Reply(ids=(*HI, END), pause_s=0.01)] * 100_000)
    flags = ("--store", f"sqlite://{tmp_path}/rollouts.db", "--workers", "2")
    with ServeProcess([mortal.url], tmp_path / "log", *flags) as proxy:
        await asyncio.to_thread(proxy.wait_workers_ready, 2)
        before = proxy.workers
        load = _Load(proxy.url)
        await load.until(50)
        served = (await _scrape(proxy.url)).value("requests_total", route=CHAT)
        os.kill(before[0], number)
        await asyncio.to_thread(wait_until, lambda: before[0] not in proxy.workers)
        await load.until(20)
        assert (await _scrape(proxy.url)).value("requests_total", route=CHAT) >= served
        await asyncio.to_thread(proxy.wait_workers_ready, 3)
        assert before[1] in proxy.workers and len(proxy.workers) == 2
        await load.until(50)
        await load.stop()
        assert set(load.outcomes) <= {"200", "lost"}
        assert load.outcomes["lost"] <= _CLIENTS
        counted = (await _scrape(proxy.url)).value("requests_total", route=CHAT, status="200")
        assert load.outcomes["200"] - _CLIENTS <= counted <= load.outcomes["200"] + 2 * _CLIENTS
        proxy.signal()
        assert await asyncio.to_thread(proxy.wait) == 0
    how = "was ended by SIGKILL" if number == signal.SIGKILL else "ended with exit code 0"
    assert f"worker 1 (process {before[0]}) {how}; it starts again in 0 s" in proxy.text


async def _scrape(url: str) -> Scrape:
    def scrape() -> Scrape:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            return Scrape(client)

    return await asyncio.to_thread(scrape)
