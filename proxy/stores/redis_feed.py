"""The feed of a Redis store. See `FeedStore`."""

import time
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol

from proxy.history.feed import Acknowledged, Cause, Consumer, FinishedRollout
from proxy.stores import redis_feed_scripts as scripts
from proxy.stores.redis_functions import PREFIX
from proxy.stores.redis_replies import read_reply, read_session


class _Run(Protocol):
    """Runs a script, with the prefix of all names as its key."""

    def __call__(self, script: str, *args: Any) -> Awaitable[Any]: ...


class RedisFeed:
    """The feed in the server of a store."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `FeedStore.finish`."""
        return bool(await self._run(scripts.FINISH, rollout, cause, microseconds()))

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `FeedStore.finish_idle`."""
        if limit <= 0:
            return 0
        return int(await self._run(scripts.FINISH_IDLE, repr(before), limit, microseconds()))

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        name = PREFIX + (b"feed" if tenant is None else b"feed:" + tenant.encode())
        parts = read_reply(await self._run(scripts.READ, name, after, max(limit, 0)))
        return [_finished(position, parts) for position in parts]

    async def end(self) -> int:
        """See `FeedStore.end`."""
        return int(await self._run(scripts.END))

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""
        position, at = await self._run(scripts.ACKNOWLEDGED, f"{tenant}/{consumer}")
        return None if position is None else Acknowledged(int(position), float(at))

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """See `FeedStore.acknowledge`."""
        args = (f"{tenant}/{consumer}", position, repr(time.time()))
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


def microseconds() -> int:
    """The time now, in microseconds since the epoch."""
    return int(time.time() * 1e6)


def _finished(position: bytes, parts: Iterator[bytes]) -> FinishedRollout:
    revision, cause = int(next(parts)), Cause(next(parts).decode())
    return FinishedRollout(int(float(position)), revision, cause, read_session(next(parts), parts))


def _consumer(name: bytes, parts: Iterator[bytes]) -> Consumer:
    tenant, _, consumer = name.decode().rpartition("/")
    position, waiting, oldest = next(parts), next(parts), next(parts)
    return Consumer(tenant, consumer, int(position), int(waiting), int(float(oldest)))
