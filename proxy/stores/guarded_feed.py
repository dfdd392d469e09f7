"""The feed of a guarded store: its calls are made, skipped and limited in time as those of the store."""

from collections.abc import Callable

from proxy.history.feed import Acknowledged, Cause, Consumer, FeedStore, FinishedRollout
from proxy.stores.guarded_calls import GuardedCalls


class GuardedFeed:
    """The feed of a store that may stall, fail, or be missing at first."""

    def __init__(self, feed: FeedStore, calls: GuardedCalls, refuse_waiting: Callable[[str], None]) -> None:
        """Wrap a feed.

        Args:
            refuse_waiting: raises StoreStalled for a rollout with turns that are still to be recorded.
        """
        self._feed = feed
        self._calls = calls
        self._refuse_waiting = refuse_waiting

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `FeedStore.finish`. Readers get a rollout with all its turns."""
        self._refuse_waiting(rollout)
        return await self._calls.write(self._feed.finish, rollout, cause)

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `FeedStore.finish_idle`."""
        return await self._calls.write(self._feed.finish_idle, before, limit)

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        return await self._calls.read(lambda: self._feed.read(after, limit=limit, tenant=tenant))

    async def end(self) -> int:
        """See `FeedStore.end`."""
        return await self._calls.read(self._feed.end)

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""
        return await self._calls.read(self._feed.acknowledged, tenant, consumer)

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """See `FeedStore.acknowledge`."""
        return await self._calls.write(self._feed.acknowledge, tenant, consumer, position)

    async def forget(self, tenant: str, consumer: str) -> bool:
        """See `FeedStore.forget`."""
        return await self._calls.write(self._feed.forget, tenant, consumer)

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """See `FeedStore.consumers`."""
        return await self._calls.read(self._feed.consumers, tenant)
