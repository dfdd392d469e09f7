"""The feed of a store: the rollouts that are finished, in the order in which they were finished.

Law: a rollout that is finished, or changes after that, is in the feed once, at a position greater than all
positions before it; and a position becomes visible after all smaller ones. So a reader that reads what comes
after the last position it got misses no finished rollout.

A position is the time of finishing in microseconds since the epoch, moved up where a later one was given
already. So positions of a store that was lost are smaller than those of the store that replaces it, and
readers of the lost one go on with them.
"""

from enum import StrEnum
from typing import NamedTuple, Protocol

from proxy.history.store import Session


class Cause(StrEnum):
    """Why a rollout is finished."""

    REWARD = "reward"
    """The whole rollout got a reward; or a turn did, after the rollout was finished."""
    END = "end"
    """The client ended its session."""
    IDLE = "idle"
    """It was not used for `finish_after_s`."""


class FinishedRollout(NamedTuple):
    """A rollout of the feed."""

    position: int
    """Microseconds since the epoch; unique, ascending in the order of finishing."""
    revision: int
    """1, and one more each time the rollout is finished again after a change."""
    cause: Cause
    session: Session


class Acknowledged(NamedTuple):
    """How far a consumer has read."""

    position: int
    """It has everything up to here; 0 for nothing."""
    at: float
    """When it was last written, in seconds since the epoch."""


class Consumer(NamedTuple):
    """A consumer of the feed, and what it has not acknowledged."""

    tenant: str
    name: str
    position: int
    """As `Acknowledged.position`."""
    waiting: int
    """Rollouts after that position."""
    oldest: int
    """The position of the first of them; 0 if none waits."""


class FeedStore(Protocol):
    """The feed, and the positions of its consumers. Every method may raise StoreError.

    `Store.set_rewards` finishes rollouts too, in the step that writes the rewards. `Store.delete` and
    eviction remove a rollout from the feed.
    """

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """Put a rollout at the end of the feed, with the next revision.

        Returns False, and changes nothing, if there is no such rollout, if it has no turns, or if it is in
        the feed and has no turns that were added since.
        """
        ...

    async def finish_idle(self, before: float, limit: int) -> int:
        """Finish rollouts that were last used before a time, in the order of their use.

        Each call begins where the one before stopped, in any process: rollouts that were looked at are looked
        at again only after they are used again.

        Args:
            before: seconds since the epoch.
            limit: rollouts to look at. Of rollouts used at the same time a few more may be.

        Returns:
            how many were looked at; less than `limit` if there are no more.
        """
        ...

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """Finished rollouts after a position, in their order.

        Args:
            tenant: whose; None for all.
        """
        ...

    async def end(self) -> int:
        """The last position that was given to any rollout; 0 if there was none."""
        ...

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """How far a consumer has read; None if it is not known."""
        ...

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """Note that a consumer has everything up to a position. It becomes known with its first call.

        A position beyond the end counts as the end. A position before the acknowledged one changes nothing.

        Returns:
            the position that is acknowledged now.
        """
        ...

    async def forget(self, tenant: str, consumer: str) -> bool:
        """Remove a consumer. False if it is not known."""
        ...

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """The consumers of a tenant, or of all, in the order of tenants and names."""
        ...
