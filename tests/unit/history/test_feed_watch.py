"""The watch of the feed: who waits is woken, and nobody polls for nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.history.feed import Cause
from proxy.history.feed_watch import FeedWatch
from proxy.history.store import Limits, StoreError
from proxy.stores.memory import MemoryStore
from tests.support.store_utils import add, make_turn


class _Store(MemoryStore):
    """Counts the polls; may fail."""

    def __init__(self) -> None:
        super().__init__(Limits())
        self.polls = 0
        self.fails = False
        end = self.feed.end

        async def count() -> int:
            self.polls += 1
            if self.fails:
                raise StoreError("gone")
            return await end()

        self.feed.end = count  # type: ignore[method-assign]

    async def polled(self, times: int) -> None:
        """Wait for as many more polls."""
        target = self.polls + times
        async with asyncio.timeout(15):
            while self.polls < target:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.002)


@pytest.fixture
def store() -> _Store:
    return _Store()


async def _finish(store: _Store) -> None:
    await add(store, make_turn("a"))
    await store.feed.finish("a", Cause.END)


@asynccontextmanager
async def _watching(store: _Store, poll_s: float) -> AsyncIterator[FeedWatch]:
    watch = FeedWatch(store, poll_s)
    polling = asyncio.create_task(watch.poll_forever())
    yield watch
    polling.cancel()


async def test_all_who_wait_share_the_polls_also_after_the_store_failed(store: _Store) -> None:
    store.fails = True
    async with _watching(store, 0.002) as watch:
        waiting = [asyncio.create_task(watch.wait(0, 15)) for _ in range(100)]
        leaves = asyncio.create_task(watch.wait(0, 15))
        await store.polled(3)
        leaves.cancel()
        store.fails = False
        polls = store.polls
        await _finish(store)
        assert await asyncio.gather(*waiting) == [True] * 100
        assert store.polls <= polls + 2


async def test_a_notice_wakes_without_waiting_for_the_poll(store: _Store) -> None:
    async with _watching(store, 1000.0) as watch:
        waiting = asyncio.create_task(watch.wait(0, 15))
        await store.polled(1)
        await _finish(store)
        watch.notify()
        assert await waiting


async def test_what_was_finished_before_the_wait_is_noticed(store: _Store) -> None:
    async with _watching(store, 0.005) as watch:
        await _finish(store)
        assert await watch.wait(0, 15)
        assert not await watch.wait(await store.feed.end(), 0.03)
        # also the end of another store, which may be smaller
        assert await watch.wait(2**60, 15)
