"""The watch of the feed: who waits is woken, and nobody polls for nobody."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from proxy.history import feed_watch
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

    async def finish(self, name: str) -> None:
        await add(self, make_turn(name))
        await self.feed.finish(name, Cause.END)


@pytest.fixture
def store() -> _Store:
    return _Store()


@pytest.fixture
async def watch(store: _Store) -> AsyncIterator[FeedWatch]:
    watch = FeedWatch(store)
    polling = asyncio.create_task(watch.poll_forever())
    yield watch
    polling.cancel()


async def test_all_who_wait_share_the_polls(
    store: _Store, watch: FeedWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_watch, "POLL_S", 0.02)
    waiting = [asyncio.create_task(watch.wait(0, 20)) for _ in range(100)]
    await asyncio.sleep(0.3)
    assert 1 < store.polls < 30
    await store.finish("a")
    assert await asyncio.gather(*waiting) == [True] * 100


async def test_nobody_polls_while_nobody_waits(
    store: _Store, watch: FeedWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_watch, "POLL_S", 0.01)
    assert await watch.wait(0, 0.05) is False
    await asyncio.sleep(0.05)
    polls = store.polls
    watch.notify()
    await asyncio.sleep(0.1)
    assert store.polls == polls


async def test_a_notice_wakes_at_once(
    store: _Store, watch: FeedWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_watch, "POLL_S", 30.0)
    waiting = asyncio.create_task(watch.wait(0, 20))
    await asyncio.sleep(0.05)
    await store.finish("a")
    began = time.monotonic()
    watch.notify()
    assert await waiting
    assert time.monotonic() - began < 1


async def test_what_was_finished_before_the_wait_is_noticed(store: _Store, watch: FeedWatch) -> None:
    await store.finish("a")
    assert await watch.wait(0, 5)
    assert not await watch.wait(await store.feed.end(), 0.05)
    # also the end of another store, which may be smaller
    assert await watch.wait(2**60, 5)


async def test_a_store_that_fails_is_polled_again(
    store: _Store, watch: FeedWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_watch, "POLL_S", 0.01)
    store.fails = True
    waiting = asyncio.create_task(watch.wait(0, 20))
    await asyncio.sleep(0.1)
    assert not waiting.done() and store.polls > 2
    store.fails = False
    await store.finish("a")
    assert await waiting


async def test_one_who_leaves_is_forgotten(store: _Store, watch: FeedWatch) -> None:
    leaves = asyncio.create_task(watch.wait(0, 20))
    await asyncio.sleep(0.01)
    leaves.cancel()
    stays = asyncio.create_task(watch.wait(0, 20))
    await store.finish("a")
    assert await stays
    assert leaves.cancelled() or (await asyncio.gather(leaves, return_exceptions=True))
