"""Time that passes and clocks that are set: nothing that was used lately is evicted, in any store."""

import time
from collections.abc import Iterator

import pytest

from tests.support.store_utils import add, make_turn, opened
from tokenproxy.record import feed
from tokenproxy.record.store import Evicted, Limits, Store
from tokenproxy.store import eviction
from tokenproxy.store.redis import RedisStore

_DAY = 86_400.0
_LIMITS = Limits(max_age_s=7 * _DAY)


class Clock:
    """What the machines' clocks show, and the time that really passes."""

    def __init__(self) -> None:
        self._time, self._elapsed = time.time, eviction._elapsed
        self.ahead = 0.0
        self.passed = 0.0

    def time(self) -> float:
        return self._time() + self.ahead

    def elapsed(self) -> float:
        return self._elapsed() + self.passed

    def set(self, seconds: float) -> None:
        """Somebody sets the clocks."""
        self.ahead += seconds

    def wait(self, seconds: float) -> None:
        self.ahead += seconds
        self.passed += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()

    async def server_time(store: RedisStore) -> float:
        return clock.time()

    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(eviction, "_elapsed", clock.elapsed)
    monkeypatch.setattr(RedisStore, "_server_time", server_time)
    yield clock


async def _names(store: Store) -> list[str]:
    """The rollouts, the last used first."""
    return [session.id for session in await store.sessions(limit=100)]


async def test_the_old_are_evicted_while_the_clock_is_steady(url: str, clock: Clock) -> None:
    """A pin keeps a rollout until it ends, and a consumer that is gone is forgotten."""
    async with opened(url, _LIMITS) as store:
        for name in ("idle", "used", "pinned"):
            await add(store, make_turn(name))
        await store.pin("pinned", time.time() + 10 * _DAY)
        await feed.acknowledge(store, "", "gone", 0)
        for _ in range(7):
            assert await store.evict() == Evicted()
            clock.wait(_DAY)
            await store.pin("used", 0.0)
        clock.wait(60.0)
        await feed.acknowledge(store, "", "here", 0)
        assert (await store.evict()).rollouts == 1
        assert set(await _names(store)) == {"used", "pinned"}
        assert [each.name for each in await feed.consumers(store)] == ["here"]
        clock.wait(3 * _DAY)
        assert (await store.evict()).rollouts == 1
        assert await _names(store) == ["used"]


@pytest.mark.parametrize("days", [30.0, -30.0])
async def test_a_clock_that_is_set_evicts_nothing_until_it_was_steady(
    url: str, clock: Clock, days: float
) -> None:
    async with opened(url, _LIMITS) as store:
        await add(store, make_turn("r"))
        await feed.acknowledge(store, "", "c", 0)
        assert await store.evict() == Evicted()
        clock.wait(60.0)
        clock.set(days * _DAY)
        for _ in range(14):
            assert await store.evict() == Evicted()
            assert await feed.acknowledged(store, "", "c")
            clock.wait(_DAY / 2)
        clock.wait(_DAY / 2)
        assert (await store.evict()).rollouts == (days > 0)  # set back, it was used in the future
        assert len(await feed.consumers(store)) == (days < 0)


async def test_one_process_tells_the_others(shared_url: str, clock: Clock) -> None:
    async with opened(shared_url, _LIMITS) as first, opened(shared_url, _LIMITS) as other:
        await add(first, make_turn("r"))
        await first.evict()
        clock.set(3 * _DAY)  # less than a gap that tells by itself
        assert await first.evict() == Evicted()
        async with opened(shared_url, _LIMITS) as late:
            for _ in range(2):
                clock.wait(4.5 * _DAY / 2)
                assert await late.evict() == Evicted()
        assert await other.evict() == Evicted()
