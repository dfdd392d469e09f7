"""The watch of the feed: who waits is woken; `tests/contract/web/test_feed.py` has the route."""

import asyncio
from typing import Any

import pytest

from tests.support.store_utils import add, make_turn
from tests.support.utils import until
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.claims import Tasks
from tokenproxy.record.feed import FeedWatch
from tokenproxy.record.store import FeedPage, Limits, StoreError
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store.sqlite import SqliteStore


@pytest.mark.parametrize("notified", [False, True])
async def test_all_who_wait_share_the_polls_also_after_the_store_failed(notified: bool) -> None:
    store, polls, fails = SqliteStore(None, Limits()), 0, True
    state = store.feed

    async def count(after: int, **options: Any) -> FeedPage:
        nonlocal polls
        polls += 1
        if fails:
            raise StoreError("gone")
        return await state(after, **options)

    store.feed = count  # type: ignore[method-assign]
    watch = FeedWatch(store, 1000.0 if notified else 0.05)
    tasks = Tasks(Metrics(), 0.002)
    tasks.run_forever(watch.poll, "the feed cannot be watched")
    waiting = [asyncio.create_task(watch.wait(0, 15)) for _ in range(100)]
    await until(lambda: polls >= (1 if notified else 3))
    fails, before = False, polls
    await add(store, make_turn("a"))
    await store.finish("a", Cause.END)
    if notified:
        watch.notify()
    assert await asyncio.gather(*waiting) == [True] * 100
    assert polls <= before + 2
    # the end of another store may be smaller
    waits = asyncio.create_task(watch.wait(2**60, 15))
    watch.notify()
    assert await waits
    await tasks.aclose()
