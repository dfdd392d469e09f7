"""What each process does for the feed in the background."""

import asyncio
import time
from collections.abc import Callable

import pytest

from proxy.history import feed_tasks
from proxy.history.feed import Cause
from proxy.history.feed_tasks import finish_idle_forever, report_consumers_forever
from proxy.history.store import Limits, Store, StoreError
from proxy.metrics import Metrics
from proxy.stores.memory import MemoryStore
from tests.support.store_utils import make_session, make_turn


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(Limits())


async def _add(store: Store, *names: str, used: float | None = None) -> None:
    for name in names:
        tenant = name.rpartition("/")[0]
        await store.add(make_session(name, tenant=tenant), [make_turn(name)], [[]])
        if used is not None:
            await store.save_session(make_session(name, tenant=tenant, used=used))


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


async def _until_finished(store: Store, count: int) -> None:
    async with asyncio.timeout(10):
        while len(await _finished(store)) < count:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


async def _finished(store: Store) -> list[str]:
    return [each.session.id for each in await store.feed.read(0, limit=10_000)]


async def test_many_idle_rollouts_are_finished_in_steps(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tasks, "STEP", 4)
    monkeypatch.setattr(feed_tasks, "PAUSE_S", 0.0)
    names = [f"r{number:02}" for number in range(30)]
    for number, name in enumerate(names):
        await _add(memory, name, used=100.0 + number)
    await _add(memory, "busy")
    monkeypatch.setattr(feed_tasks, "LONGEST_INTERVAL_S", 0.01)
    running = asyncio.create_task(finish_idle_forever(memory, Metrics(), 60.0))
    await _until_finished(memory, 30)
    await asyncio.sleep(0.05)
    assert await _finished(memory) == names
    running.cancel()


async def test_a_store_that_fails_is_tried_again(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tasks, "LONGEST_INTERVAL_S", 0.01)
    await _add(memory, "r", used=100.0)
    works, metrics = memory.feed.finish_idle, Metrics()

    async def fail(before: float, limit: int) -> int:
        raise StoreError("gone")

    memory.feed.finish_idle = fail  # type: ignore[method-assign]
    running = asyncio.create_task(finish_idle_forever(memory, metrics, 60.0))
    await _until(lambda: _value(metrics, "tokenproxy_store_errors_total") > 1)
    memory.feed.finish_idle = works  # type: ignore[method-assign]
    await _until_finished(memory, 1)
    running.cancel()


def _value(metrics: Metrics, name: str, consumer: str | None = None) -> float:
    labels = {} if consumer is None else {"consumer": consumer}
    return metrics.registry.get_sample_value(name, labels) or 0.0


async def test_consumers_of_one_name_are_reported_together(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_tasks, "REPORT_S", 0.01)
    monkeypatch.setattr(feed_tasks, "MOST_REPORTED", 2)
    await _add(memory, "t/a", "t/b", "u/a")
    for name in ("t/a", "t/b", "u/a"):
        await memory.feed.finish(name, Cause.END)
    [oldest, *_] = await memory.feed.read(0, limit=1)
    for tenant, name in (("t", "same"), ("t", "read"), ("t", "third"), ("u", "same")):
        await memory.feed.acknowledge(tenant, name, 2**60 if name == "read" else 0)
    metrics = Metrics()
    running = asyncio.create_task(report_consumers_forever(memory, metrics))
    waiting, age = "tokenproxy_feed_waiting_rollouts", "tokenproxy_feed_oldest_seconds"
    await _until(lambda: _value(metrics, waiting, "same") == 3)
    assert 0 < _value(metrics, age, "same") <= time.time() - oldest.position / 1e6
    assert metrics.registry.get_sample_value(age, {"consumer": "read"}) == 0
    assert metrics.registry.get_sample_value(waiting, {"consumer": "third"}) is None
    await memory.feed.forget("t", "read")
    await _until(lambda: metrics.registry.get_sample_value(waiting, {"consumer": "third"}) == 2)
    assert metrics.registry.get_sample_value(waiting, {"consumer": "read"}) is None
    running.cancel()
