"""The feed of a memory store. See `FeedStore`."""

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.history.feed import Acknowledged, Cause, Consumer, FinishedRollout
from proxy.history.store import Cursor, Session


@dataclass(frozen=True, slots=True)
class _Entry:
    position: int
    rollout: str
    tenant: str
    revision: int
    turns: int
    """Number of its turns at that time."""
    cause: Cause


class MemoryFeed:
    """Plain lists and dictionaries. Calls never await, so each is one step for all others."""

    def __init__(
        self, session_of: Callable[[str], Session | None], by_use: Callable[[], list[Cursor]]
    ) -> None:
        """Create an empty feed.

        Args:
            session_of: returns the session of a rollout.
            by_use: returns the places of all sessions, sorted.
        """
        self._session_of = session_of
        self._by_use = by_use
        self._last = 0
        self._idle = Cursor(0.0, "")
        """The last session that `finish_idle` looked at."""
        self._entries: dict[str, _Entry] = {}
        self._positions: defaultdict[str | None, list[int]] = defaultdict(list)
        """The positions of each tenant, and of all under None, sorted."""
        self._rollouts: dict[int, str] = {}
        """By position."""
        self._consumers: dict[tuple[str, str], Acknowledged] = {}

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `FeedStore.finish`."""
        return self._finish(rollout, cause)

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `FeedStore.finish_idle`."""
        by_use = self._by_use()
        start = bisect_right(by_use, self._idle)
        places = by_use[start : min(start + limit, bisect_left(by_use, Cursor(before, "")))]
        for place in places:
            self._finish(place.id, Cause.IDLE)
            self._idle = place
        return len(places)

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        positions = self._positions.get(tenant, [])
        start = bisect_right(positions, after)
        entries = [self._entries[self._rollouts[place]] for place in positions[start : start + limit]]
        return [
            FinishedRollout(entry.position, entry.revision, entry.cause, session)
            for entry in entries
            if (session := self._session_of(entry.rollout)) is not None
        ]

    async def end(self) -> int:
        """See `FeedStore.end`."""
        return self._last

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""
        return self._consumers.get((tenant, consumer))

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """See `FeedStore.acknowledge`."""
        before = self._consumers.get((tenant, consumer), Acknowledged(0, 0.0))
        position = max(before.position, min(position, self._last))
        self._consumers[tenant, consumer] = Acknowledged(position, time.time())
        return position

    async def forget(self, tenant: str, consumer: str) -> bool:
        """See `FeedStore.forget`."""
        return self._consumers.pop((tenant, consumer), None) is not None

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """See `FeedStore.consumers`."""
        listed = sorted(key for key in self._consumers if tenant in (None, key[0]))
        return [self._consumer(*key) for key in listed]

    def finish_rewarded(
        self, rollout: str, before: Mapping[str, float], rewards: Mapping[str, float]
    ) -> None:
        """Finish a rollout whose rewards were set, as `Store.set_rewards` promises.

        Args:
            before: its rewards until then.
            rewards: those that were set.
        """
        if rewards:
            changed = not rewards.items() <= before.items()
            self._finish(rollout, Cause.REWARD, changed=changed, only_again="" not in rewards)

    def undelivered(self, rollout: str) -> bool:
        """Whether a rollout is finished, and a consumer of its tenant has not acknowledged it."""
        entry = self._entries.get(rollout)
        return entry is not None and any(
            tenant == entry.tenant and acknowledged.position < entry.position
            for (tenant, _), acknowledged in self._consumers.items()
        )

    def remove(self, rollout: str) -> None:
        """Remove a rollout that the store removes."""
        entry = self._entries.pop(rollout, None)
        if entry is None:
            return
        del self._rollouts[entry.position]
        for tenant in (None, entry.tenant):
            positions = self._positions[tenant]
            del positions[bisect_left(positions, entry.position)]
            if not positions:
                del self._positions[tenant]

    def forget_consumers(self, before: float) -> None:
        """Remove the consumers that acknowledged nothing since a time in seconds since the epoch."""
        self._consumers = {key: value for key, value in self._consumers.items() if value.at >= before}

    def _finish(self, rollout: str, cause: Cause, *, changed: bool = False, only_again: bool = False) -> bool:
        """See `sqlite_feed.finish`."""
        session, entry = self._session_of(rollout), self._entries.get(rollout)
        if session is None or not session.turns or (only_again and entry is None):
            return False
        if entry is not None and entry.turns == session.turns and not changed:
            return False
        self.remove(rollout)
        self._last = max(self._last + 1, int(time.time() * 1e6))
        revision = entry.revision + 1 if entry else 1
        self._entries[rollout] = _Entry(self._last, rollout, session.tenant, revision, session.turns, cause)
        self._rollouts[self._last] = rollout
        for tenant in (None, session.tenant):
            self._positions[tenant].append(self._last)
        return True

    def _consumer(self, tenant: str, name: str) -> Consumer:
        position = self._consumers[tenant, name].position
        positions = self._positions.get(tenant, [])
        start = bisect_right(positions, position)
        waiting = len(positions) - start
        return Consumer(tenant, name, position, waiting, positions[start] if waiting else 0)
