"""What each process does for the feed in the background."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from proxy.history import feed_tasks
from proxy.history.feed import Cause
from proxy.history.feed_tasks import MOST_REPORTED, STEP, finish_idle_forever, report_consumers_forever
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
    tenant = name.rpartition("/")[0]
    await store.add(make_session(name, tenant=tenant), [make_turn(name, completion=b"")], [[]])
    await store.save_session(make_session(name, tenant=tenant, used=used))


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


async def test_consumers_of_one_name_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_tasks, "REPORT_S", 0.005)
    memory, metrics = MemoryStore(Limits()), Metrics()
    for name in ("t/a", "t/b", "u/a"):
        await _add(memory, name, used=1.0)
        await memory.feed.finish(name, Cause.END)
    names = [f"c{number:03}" for number in range(MOST_REPORTED + 1)]
    for tenant, name in (("u", names[0]), *(("t", name) for name in names)):
        await memory.feed.acknowledge(tenant, name, 2**60 if name == names[1] else 0)

    def value(metric: str, consumer: str) -> float | None:
        return metrics.registry.get_sample_value(f"tokenproxy_feed_{metric}", {"consumer": consumer})

    async def reported() -> bool:
        return value("waiting_rollouts", names[0]) == 3

    async def forgotten() -> bool:
        return value("waiting_rollouts", names[1]) is None

    running = asyncio.create_task(report_consumers_forever(memory, metrics))
    await _until(reported)
    assert (value("oldest_seconds", names[0]) or 0) > 0 == value("oldest_seconds", names[1])
    assert value("waiting_rollouts", names[-1]) is None
    await memory.feed.forget("t", names[1])
    await _until(forgotten)
    running.cancel()
