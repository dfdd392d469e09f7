"""What each process does for the feed in the background."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from proxy.history.feed_tasks import STEP, finish_idle_forever
from proxy.history.store import Limits, Store, StoreError
from proxy.metrics import Metrics
from proxy.stores.memory import MemoryStore
from tests.support.store_utils import make_session, make_turn

_AFTER_S = 0.01


async def _until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(15):
        while not await condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.002)


async def _add(store: Store, name: str, used: float) -> None:
    await store.add(make_session(name), [make_turn(name, completion=b"")], [[]])
    await store.save_session(make_session(name, used=used))


async def test_idle_rollouts_are_finished_in_steps_also_after_the_store_failed() -> None:
    memory, metrics = MemoryStore(Limits()), Metrics()
    names = [f"r{number:03}" for number in range(STEP + 2)]
    for number, name in enumerate(names):
        await _add(memory, name, used=100.0 + number)
    await _add(memory, "busy", used=time.time() + 1000)
    works = memory.feed.finish_idle

    async def fail(before: float, limit: int) -> int:
        raise StoreError("gone")

    async def failed() -> bool:
        return (metrics.registry.get_sample_value("tokenproxy_store_errors_total") or 0.0) > 1

    async def all_finished() -> bool:
        return [each.session.id for each in await memory.feed.read(0, limit=1000)] == names

    memory.feed.finish_idle = fail  # type: ignore[method-assign]
    running = asyncio.create_task(finish_idle_forever(memory, metrics, _AFTER_S))
    await _until(failed)
    memory.feed.finish_idle = works  # type: ignore[method-assign]
    await _until(all_finished)
    running.cancel()
