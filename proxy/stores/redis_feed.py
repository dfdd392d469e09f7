"""The feed of a Redis store. See `FeedStore`."""

import time
from collections.abc import Awaitable, Iterator
from typing import Any, NamedTuple, Protocol

from proxy.history.feed import Acknowledged, Cause, Consumer, FinishedRollout
from proxy.stores import redis_feed_scripts as scripts
from proxy.stores.redis_replies import read_reply, read_session


class _Run(Protocol):
    """Runs a script, with the prefix of all names as its key."""

    def __call__(self, script: str, *args: Any) -> Awaitable[Any]: ...


class RedisFeed:
    """The feed in the server of a store."""

    def __init__(self, run: _Run, prefix: bytes, place: "Place") -> None:
        self._run = run
        self._prefix = prefix
        self._place = place

    async def finish(self, rollout: str, cause: Cause, floor: int = 0) -> bool:
        """See `FeedStore.finish`. `floor`: a position; that of the rollout will be greater."""
        now = self._place.position(floor)
        return bool(await self._run(scripts.FINISH, rollout, cause, now, self._place.of))

    async def finish_idle(self, before: float, limit: int, floor: int = 0) -> int:
        """See `FeedStore.finish_idle`. `floor`: as `finish`."""
        if limit <= 0:
            return 0
        now = self._place.position(floor)
        return int(await self._run(scripts.FINISH_IDLE, repr(before), limit, now, self._place.of))

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        args = read_arguments(self._prefix, after, limit, tenant)
        return read_finished(await self._run(scripts.READ, *args, "+inf"))

    async def end(self) -> int:
        """See `FeedStore.end`."""
        return int(await self._run(scripts.END, 0))

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""
        position, at = await self._run(scripts.ACKNOWLEDGED, f"{tenant}/{consumer}")
        return None if position is None else Acknowledged(int(position), float(at))

    async def acknowledge(self, tenant: str, consumer: str, position: int, end: int = 0) -> int:
        """See `FeedStore.acknowledge`. `end`: of the feed, where this is only a part of it."""
        args = (f"{tenant}/{consumer}", position, repr(time.time()), end)
        return int(await self._run(scripts.ACKNOWLEDGE, *args))

    async def forget(self, tenant: str, consumer: str) -> bool:
        """See `FeedStore.forget`."""
        return bool(await self._run(scripts.FORGET, f"{tenant}/{consumer}"))

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """See `FeedStore.consumers`."""
        parts = read_reply(await self._run(scripts.CONSUMERS, *([] if tenant is None else [tenant])))
        return sorted(_consumer(name, parts) for name in parts)

    async def forget_consumers(self, before: float) -> None:
        """Remove the consumers that acknowledged nothing since a time in seconds since the epoch."""
        await self._run(scripts.FORGET_OLD, repr(before))


class Place(NamedTuple):
    """Which partition of a store this is. The positions of its feed are `number` modulo `of`."""

    number: int
    of: int

    def position(self, floor: int) -> int:
        """The time now, in microseconds since the epoch, moved up to a position of this partition."""
        earliest = max(int(time.time() * 1e6), floor + 1)
        return earliest + (self.number - earliest) % self.of


WHOLE = Place(0, 1)
"""Of a store that is not split."""


def read_arguments(prefix: bytes, after: int, limit: int, tenant: str | None) -> tuple[bytes, int, int]:
    """The arguments of `READ`, without the last one."""
    return prefix + (b"feed" if tenant is None else b"feed:" + tenant.encode()), after, max(limit, 0)


def read_finished(packed: bytes) -> list[FinishedRollout]:
    """The reply of `READ`."""
    parts = read_reply(packed)
    return [_finished(position, parts) for position in parts]


def _finished(position: bytes, parts: Iterator[bytes]) -> FinishedRollout:
    revision, cause = int(next(parts)), Cause(next(parts).decode())
    return FinishedRollout(int(float(position)), revision, cause, read_session(next(parts), parts))


def _consumer(name: bytes, parts: Iterator[bytes]) -> Consumer:
    tenant, _, consumer = name.decode().rpartition("/")
    position, waiting, oldest = next(parts), next(parts), next(parts)
    return Consumer(tenant, consumer, int(position), int(waiting), int(float(oldest)))
