"""How stores keep their limits: in short steps, so that other writers get in between.

Age is the difference of two readings of a clock that may be set in between. So the store remembers since when
its clock has been steady, and evicts by age only if it was steady for all of that age. A process that runs
notices from the time that really passed that the clock was set. One that starts later notices a gap since
somebody looked, which a time without any process leaves too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tokenproxy.record.store import Evicted, Limits

STEP = 512
"""Rollouts and turns that one step evicts. The last rollout may exceed it: a rollout is evicted whole."""


def eviction_target(limits: Limits) -> int:
    """Bytes that may remain when eviction is needed: below the limit, so that not every call evicts."""
    return limits.max_bytes * 9 // 10


def add_evicted(first: Evicted, second: Evicted) -> Evicted:
    """The sum of both."""
    return Evicted(
        first.rollouts + second.rollouts,
        first.turns + second.turns,
        first.size + second.size,
        first.undelivered + second.undelivered,
    )


async def evict_in_steps(lock: asyncio.Lock, step: Callable[[], Awaitable[Evicted]]) -> Evicted:
    """Repeat a step until it evicts nothing.

    Args:
        lock: shared by all tasks of one store. Without it the steps of many tasks would end up in one
            transaction, and other processes would wait for all of them.
    """
    total = Evicted()
    async with lock:
        while (evicted := await step()).rollouts:
            total = add_evicted(total, evicted)
    return total


class ClockRecord(NamedTuple):
    """What a store holds about its clock, for all processes that share it. In seconds since the epoch."""

    seen: float
    """When a process looked last."""
    steady_since: float
    """When the clock was last found to be set; 0 if it never was."""


class AgeClock:
    """Finds out whether the clock of a store was set. One for each process."""

    def __init__(self, max_age_s: float) -> None:
        self.tolerance_s = min(60.0, max_age_s / 2)
        """Differences up to this are not a clock that was set."""
        self.longest_gap_s = max_age_s / 2
        """Seconds without a look at the clock after which a change of it may have been missed."""
        self._max_age_s = max_age_s
        self._last: tuple[float, float] | None = None

    def was_set(self, now: float) -> bool:
        """Whether the clock, which shows `now`, was set since the last call."""
        elapsed = _elapsed()
        last, self._last = self._last, (now, elapsed)
        return last is not None and abs(now - last[0] - (elapsed - last[1])) > self.tolerance_s

    def next_record(self, record: ClockRecord | None, now: float, was_set: bool) -> ClockRecord:
        """What the store holds from now on."""
        if record is None:
            return ClockRecord(now, now if was_set else 0.0)
        unsteady = was_set or not -self.tolerance_s <= now - record.seen <= self.longest_gap_s
        return ClockRecord(now, now if unsteady else record.steady_since)

    def oldest(self, now: float, steady_since: float) -> float:
        """Rollouts last used before this time are too old; 0 if that cannot be told yet."""
        oldest = now - self._max_age_s
        return oldest if oldest >= steady_since else 0.0


def _elapsed() -> float:
    """Seconds that really passed, since some time before the process started; a suspended machine's too."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)
