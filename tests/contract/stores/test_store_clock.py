"""Clocks that are set: nothing that was used lately is evicted, in any store."""

import time
from collections.abc import Iterator

import pytest

from proxy.history.store import Evicted, Limits, Store
from proxy.stores import eviction
from proxy.stores.eviction import AgeClock, ClockRecord
from proxy.stores.redis import RedisStore
from tests.support.store_utils import add, make_session, make_turn, opened

_DAY = 86_400.0
_MONTH = 30 * _DAY
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
        """Time passes."""
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


@pytest.mark.parametrize("days", [30.0, 8.0, -30.0])
async def test_a_clock_that_is_set_evicts_nothing(url: str, clock: Clock, days: float) -> None:
    async with opened(url, _LIMITS) as store:
        await add(store, make_turn("r"))
        assert await store.evict() == Evicted()
        clock.wait(60.0)
        clock.set(days * _DAY)
        assert await store.evict() == Evicted()
        for _ in range(13):
            clock.wait(_DAY / 2)
            assert await store.evict() == Evicted()
        assert await _names(store) == ["r"]


async def test_age_counts_again_after_a_steady_time(url: str, clock: Clock) -> None:
    async with opened(url, _LIMITS) as store:
        await add(store, make_turn("idle"))
        await add(store, make_turn("used"))
        await store.evict()
        clock.set(_MONTH)
        for _ in range(16):
            assert await store.evict() == Evicted() or await _names(store) == ["used"]
            clock.wait(_DAY / 2)
            await store.pin("used", 0.0)
        assert (await store.evict()).rollouts == 0
        assert await _names(store) == ["used"]


async def test_the_old_are_evicted_while_the_clock_is_steady(url: str, clock: Clock) -> None:
    async with opened(url, _LIMITS) as store:
        await add(store, make_turn("r"))
        for _ in range(7):
            assert await store.evict() == Evicted()
            clock.wait(_DAY)
        clock.wait(60.0)
        assert (await store.evict()).rollouts == 1


@pytest.mark.parametrize("days", [30.0, -30.0])
async def test_a_process_that_starts_after_the_clock_was_set(
    shared_url: str, clock: Clock, days: float
) -> None:
    async with opened(shared_url, _LIMITS) as store:
        await add(store, make_turn("r"))
        await store.evict()
    clock.set(days * _DAY)
    async with opened(shared_url, _LIMITS) as store:
        for _ in range(10):
            assert await store.evict() == Evicted()
            clock.wait(_DAY / 2)


async def test_one_process_tells_the_others(shared_url: str, clock: Clock) -> None:
    async with opened(shared_url, _LIMITS) as first, opened(shared_url, _LIMITS) as other:
        await add(first, make_turn("r"))
        await first.evict()
        clock.set(3 * _DAY)  # less than a gap that tells by itself
        assert await first.evict() == Evicted()
        async with opened(shared_url, _LIMITS) as late:
            clock.wait(4.5 * _DAY / 2)
            assert await late.evict() == Evicted()
            clock.wait(4.5 * _DAY / 2)
            assert await late.evict() == Evicted()
        assert await other.evict() == Evicted()


async def test_a_pause_shorter_than_half_the_age_is_none(shared_url: str, clock: Clock) -> None:
    async with opened(shared_url, _LIMITS) as store:
        await add(store, make_turn("r"))
        await store.evict()
    for _ in range(3):
        clock.wait(2.5 * _DAY)
        async with opened(shared_url, _LIMITS) as store:
            evicted = await store.evict()
    assert evicted.rollouts == 1


async def test_the_last_used_is_last_even_if_the_clock_is_set_back(whole_url: str, clock: Clock) -> None:
    limit = 20_000
    async with opened(whole_url, Limits(max_bytes=limit)) as store:
        for name in ("idle", "matched", "continued"):
            await add(store, make_turn(name))
        clock.set(-_MONTH)
        await add(store, make_turn("new"))
        await store.pin("matched", 0.0)
        await add(store, make_turn("continued"))
        assert await _names(store) == ["continued", "matched", "new", "idle"]
        number = 0
        while "idle" in await _names(store):
            number += 1
            await add(store, make_turn(f"other{number}"))
            await add(store, make_turn("continued"))
        assert (await _names(store))[0] == "continued"
        assert f"other{number}" in await _names(store)


async def test_a_saved_session_is_used_even_if_the_clock_is_set_back(whole_url: str, clock: Clock) -> None:
    async with opened(whole_url) as store:
        await add(store, make_turn("r"))
        clock.set(-_MONTH)
        await store.save_session(make_session("saved"))
        await store.pin("saved", 0.0)  # as the route does
        assert await _names(store) == ["saved", "r"]


@pytest.mark.parametrize("tolerated", [59.0, -59.0])
def test_a_small_correction_is_no_jump(clock: Clock, tolerated: float) -> None:
    ages = AgeClock(7 * _DAY)
    assert not ages.was_set(time.time())
    clock.wait(1000.0)
    clock.set(tolerated)
    assert not ages.was_set(time.time())
    clock.set(2 * tolerated)
    assert ages.was_set(time.time())
    assert not ages.was_set(time.time())


def test_clock_that_was_not_looked_at_is_trusted() -> None:
    ages = AgeClock(100.0)
    assert ages.next_record(None, 1000.0, False) == ClockRecord(1000.0, 0.0)
    assert ages.next_record(None, 1000.0, True) == ClockRecord(1000.0, 1000.0)
    assert (ages.oldest(1000.0, 900.0), ages.oldest(1000.0, 900.1)) == (900.0, 0.0)
