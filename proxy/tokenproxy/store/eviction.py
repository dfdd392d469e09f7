"""How stores keep their limits: the rollouts used least recently are evicted, each as a whole.

Age is the difference of two readings of a clock that may be set in between. So the store remembers since when
its clock has been steady, and evicts by age only if it was steady for all of that age. A process that runs
notices from the time that really passed that the clock was set. One that starts later notices a gap since
somebody looked, which a time without any process leaves too.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tokenproxy.record.feed import acknowledged_by_all, forget_silent
from tokenproxy.record.store import Evicted, Session, Store, Time

_PAGE = 64
"""Sessions that are read at a time, and evicted together."""
_CLOCK = "clock"
"""The space of the store that holds the `_ClockRecord`."""


class Evicting(Store, Protocol):
    """A store, as its `Eviction` sees it."""

    async def oldest(self, after: float, limit: int) -> tuple[int, list[Session]]:
        """Bytes of all turns and descriptions, and sessions with a greater `used`, in ascending order.

        Both at the same time: if others evict between the two, the bytes are more than the sessions explain.
        """
        ...

    async def remove(self, rollout: str, now: float) -> bool:
        """Evict a rollout that is not pinned at a time, and remember its keys. False if it stays.

        At an infinite time none is pinned, and the keys are not remembered: the rollout is deleted.
        """
        ...


class _ClockRecord(NamedTuple):
    """What a store holds about its clock, for all processes that share it."""

    seen: Time
    """When a process looked last."""
    steady_since: Time
    """When the clock was last found to be set; 0 if it never was."""


_decode = msgspec.msgpack.Decoder(_ClockRecord).decode


class Eviction:
    """Keeps the limits of a store, and finds out whether its clock was set. One for each process."""

    def __init__(self, store: Evicting) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        """Without it the evictions of many tasks would end up in one transaction."""
        self._last: tuple[float, float] | None = None
        """What the clock showed last, and the time that had passed."""

    async def run(self, own: str = "", *, too_old: float = 0.0) -> Evicted:
        """Evict rollouts last used before a time, and those used least recently if the store holds too much.

        Args:
            own: evicted last, and only if it alone exceeds the limit.
        """
        store, most, now = self._store, self._store.limits.max_bytes, time.time()
        gone: list[Evicted] = []
        async with self._lock:
            read = await acknowledged_by_all(store)
            held, page = await store.oldest(-1.0, _PAGE)
            before, after = held, -1.0
            # below the limit, so that not every call evicts
            target = most * 9 // 10 if held > most else most
            own_session: Session | None = None
            while page:
                chosen = []
                for session in page:
                    if held <= target and session.used >= too_old:
                        break
                    after = session.used
                    if session.id == own:
                        own_session = session
                    elif session.pinned_until <= now:
                        chosen.append(session)
                        held -= session.size
                gone += await self._remove(chosen, read, now)
                if after < page[-1].used:
                    break
                held, page = await store.oldest(after, _PAGE)
            else:
                if own_session is not None and own_session.size > most and own_session.pinned_until <= now:
                    gone += await self._remove([own_session], read, now)
        return Evicted(
            len(gone),
            sum(each.turns for each in gone),
            sum(each.size for each in gone),
            sum(each.undelivered for each in gone),
            before / most,
        )

    async def of_old(self, now: float) -> Evicted:
        """Evict rollouts and forget consumers that are too old, if that can be told yet.

        Args:
            now: what the clock of the store shows. Other processes learn that it was set.
        """
        store, unsteady = self._store, self.clock_was_set(now)
        while True:
            held = (await store.get(_CLOCK, [""])).get("")
            record = None if held is None else store.unreadable.read(f"{_CLOCK} ", _decode, held)
            seen, since = record or (now, 0.0)
            # after a gap a change of the clock may have been missed
            if unsteady or not -self._tolerance_s <= now - seen <= store.limits.max_age_s / 2:
                since = now
            if await store.put(_CLOCK, "", msgspec.msgpack.encode(_ClockRecord(now, since)), before=held):
                break
        oldest = now - store.limits.max_age_s
        if oldest < since:
            return await self.run()
        await forget_silent(store, oldest)
        return await self.run(too_old=oldest)

    def clock_was_set(self, now: float) -> bool:
        """Whether the clock, which shows `now`, was set since the last call."""
        elapsed = _elapsed()
        last, self._last = self._last, (now, elapsed)
        return last is not None and abs(now - last[0] - (elapsed - last[1])) > self._tolerance_s

    async def _remove(self, chosen: Sequence[Session], read: Mapping[str, int], now: float) -> list[Evicted]:
        """Evict rollouts. `read`: what all consumers of a tenant have acknowledged."""
        removed = await asyncio.gather(*(self._store.remove(session.id, now) for session in chosen))
        return [
            Evicted(1, each.turns, each.size, each.position > read.get(each.tenant, each.position))
            for each, done in zip(chosen, removed, strict=True)
            if done
        ]

    @property
    def _tolerance_s(self) -> float:
        """Differences up to this are not a clock that was set."""
        return min(60.0, self._store.limits.max_age_s / 2)


def _elapsed() -> float:
    """Seconds that really passed, since some time before the process started; a suspended machine's too."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_time is None else time.clock_gettime(boot_time)
