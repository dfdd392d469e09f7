"""Where turns are kept: one protocol for SQLite, in a file or in memory, and Redis.

What every store promises:

- what a call changed is visible to every process that shares the store once the call has returned, and
  survives the end of this process (a store in memory has only one process, and does not survive it);
- a turn is written once; writing the same turn again changes nothing;
- the index is written before its turns, and outlives them: a turn of which the index knows and that is not
  there counts as one that a request may mean, so that no other is continued in its place;
- the limits hold after every call that adds something, with no other call: the rollouts used least
  recently are evicted, each with all its turns, and what they were found by is remembered as evicted for
  a while. A pinned rollout is never evicted.
"""

import logging
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

from tokenproxy.record.turn import Found, IndexedTurn, Turn
from tokenproxy.record.vocabulary import Cause

if TYPE_CHECKING:
    from tokenproxy.monitoring.metrics import Metrics

log = logging.getLogger("tokenproxy")

P = ParamSpec("P")
T = TypeVar("T")

DESCRIPTION = ("defaults", "overrides", "metadata", "limits", "policy")
"""The fields of a `Session` that its client sets, each a JSON object."""
MAX_DESCRIPTION_BYTES = 65_536
"""Of a session's description: all these fields together."""

RESPONSES = "responses"
"""Space of the responses that are kept for retries."""
DOCUMENTS = "documents"
"""Space of the responses of `/v1/responses`."""

Before = bytes | None | EllipsisType
"""The value that a name must have, so that it gets another one; `...` for any."""
ALL = 2**31 - 1
"""A limit that nothing reaches."""
LATEST_S = 2.0**33
"""Times are before the year 2242. From there on, a float does not tell microseconds apart."""
LAST_POSITION = 2**62
"""Positions of the feed are smaller."""
Time = Annotated[float, msgspec.Meta(ge=0.0, lt=LATEST_S)]
"""Seconds since the epoch."""
Position = Annotated[int, msgspec.Meta(ge=0, lt=LAST_POSITION)]
MOST_BYTES = 2**42
"""More than a store holds: a larger size is damaged."""
Reward = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

_NAME_CHARACTERS = 300
"""Of a damaged record's name: it may be damaged itself."""


class StoreError(Exception):
    """The store cannot be reached, or returned something unreadable; the message says what to check."""

    level: ClassVar[int] = logging.ERROR
    """At which a caller logs it."""

    def report(self, metrics: "Metrics", consequence: str) -> None:
        """Count and log the failure; the caller continues without the store."""
        metrics.store_errors.inc()
        log.log(self.level, "%s: %s", consequence, self)


class StoreStalled(StoreError):
    """The store holds a call up: somebody else has its lock, or it does not respond in time."""


class StoreSkipped(StoreError):
    """The call was not made, because calls before it failed. That was logged when it began."""

    level = logging.DEBUG


class StoreUnusable(StoreError):
    """Waiting does not help: another program's file, another version of the data, a wrong password."""


class RecordRefused(StoreError):
    """The store works and refuses what it was given; it will refuse it again."""


class RecordDamaged(StoreError):
    """The store works, and one of its records cannot be read."""


DAMAGED = (msgspec.DecodeError, ValueError, TypeError, KeyError, MemoryError, RecursionError)
"""What reading a damaged record raises: some bytes are no text, or a length is more than the memory."""


class Unreadable:
    """The records of a store that were left out because they cannot be read, since it was made."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """As `turn ID`, `session ID` and `SPACE NAME` of a value, in the order in which they were found."""

    def read(self, name: str, decode: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """What `decode` returns for a record. None if it is damaged: that is noted, and logged once."""
        try:
            return decode(*args, **named)
        except DAMAGED as error:
            name = name[:_NAME_CHARACTERS]
            if name not in self.names:
                self.names[name] = None
                log.error("%s is damaged in the store and is left out, all else is served: %s", name, error)
            return None


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout: what the store holds of it next to its turns."""

    id: str
    """Unique in the store: see `session_id`."""
    tenant: str = ""
    """Digest of the credential it belongs to; empty if no credential is required."""
    explicit: bool = True
    """Whether a client named it; False for the rollout of a conversation without a session."""
    ambiguous: bool = False
    """Whether one of its requests found the same conversation in several rollouts, so that it may belong to
    another one."""
    created: Time
    used: Time = 0.0
    """When a turn was last added or matched or its description last saved, in seconds since the epoch. Given
    by the store: unique, and ascending even if the clock is set back."""
    turns: int = 0
    size: Annotated[int, msgspec.Meta(lt=MOST_BYTES)] = 0
    """Bytes its turns and its description take in the store, which may compress them."""
    sampled_ids: int = 0
    """Number of sampled ids in its turns."""
    first_turn: Time = 0.0
    """When the request of its first recorded turn arrived, in seconds since the epoch; 0 without turns."""
    defaults: bytes = b"{}"
    """JSON object: fields of a chat request that apply where a request does not set them."""
    overrides: bytes = b"{}"
    """JSON object: fields of a chat request that replace those of a request."""
    metadata: bytes = b"{}"
    """JSON object of the client's own."""
    limits: bytes = b"{}"
    """JSON object: a `SessionLimits`."""
    policy: bytes = b"{}"
    """JSON object: a `SamplingPolicy`; empty for none."""
    rewards: dict[str, Reward] = {}
    """Of turns, by their id, and of the whole rollout, by ""."""
    pinned_until: Time = 0.0
    """It is not evicted before this time in seconds since the epoch."""
    position: Position = 0
    """Of a finished rollout its place in the feed: the time of finishing in microseconds since the epoch;
    unique, ascending in the order of finishing. 0 if it is not finished."""
    revision: int = 0
    """1 when it is finished, and one more each time it is finished again after a change."""
    cause: str = ""
    """A `Cause`: why it was finished."""

    @property
    def description_bytes(self) -> int:
        """Bytes of the fields that its client set."""
        return sum([len(getattr(self, name)) for name in DESCRIPTION])

    @property
    def name(self) -> str:
        """The id without the tenant: what clients know."""
        return self.id.removeprefix(f"{self.tenant}/") if self.tenant else self.id


def session_id(tenant: str, name: str) -> str:
    """The id of a tenant's session in a store. Names hold no slash, so two tenants never share an id."""
    return f"{tenant}/{name}" if tenant else name


class FeedPage(NamedTuple):
    """What the feed holds after a position."""

    end: int
    """The last position that was given to any rollout; for a tenant the last that one of its rollouts has, so
    that it tells nothing of the others. 0 if there is none."""
    waiting: int
    """Rollouts after the position, those not returned too."""
    sessions: list[Session]
    """The first of them, in the order of their positions."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a store holds."""

    max_bytes: int = 2**30
    """Of turns and session descriptions, as the store keeps them. If exceeded, the least recently used
    rollouts are evicted."""
    max_age_s: float = 7 * 86400.0
    """A rollout that was not used for so long is evicted."""
    response_age_s: float = 600.0
    """How long responses are kept."""
    response_bytes: int = 128 * 2**20
    """Of responses; the oldest are dropped first."""
    document_bytes: int = 256 * 2**20
    """Of documents, as the store keeps them; the oldest are dropped first."""
    evicted_keys: int = 200_000
    """How many keys of evicted turns a SQLite store remembers; the oldest are forgotten first."""

    def bytes_of(self, space: str) -> int:
        """How many bytes the values of a space may take, as the store keeps them."""
        return {RESPONSES: self.response_bytes, DOCUMENTS: self.document_bytes}.get(space, 2**62)


FULL = "the store held more than `store_max_bytes`, which can be raised"
"""Why `Store.add` evicts."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What left a store."""

    rollouts: int = 0
    turns: int = 0
    size: int = 0
    undelivered: int = 0
    """Finished rollouts among them that a consumer of the feed has not acknowledged."""
    fill: float = field(default=0.0, compare=False)
    """Share of `Limits.max_bytes` that the store held before."""

    def report(self, metrics: "Metrics", reason: str) -> None:
        """Count and log what left."""
        if self.rollouts:
            metrics.count_evicted(self.rollouts, self.undelivered)
            log.warning("evicted %d rollouts (%d turns): %s", self.rollouts, self.turns, reason)


class Store(Protocol):
    """Keeps turns, sessions, rewards, the feed of finished rollouts, and values by name.

    Every method may raise StoreError. A store is made outside an event loop and used in one; `open` comes
    first. What cannot be read is missing in what the methods return.

    Law of the feed: a rollout that is finished, or changes after that, is in the feed once, at a position
    greater than all positions before it; and a position becomes visible after all smaller ones. So a reader
    that reads what comes after the last position it got misses no finished rollout. A position is the time of
    finishing in microseconds since the epoch, moved up where a later one was given already: positions of a
    store that was lost are smaller than those of the store that replaces it.
    """

    @property
    def limits(self) -> Limits:
        """How much it holds."""
        ...

    @property
    def unreadable(self) -> Unreadable:
        """The records that it skipped."""
        ...

    async def open(self) -> None:
        """Connect, and create what must exist."""
        ...

    async def aclose(self) -> None:
        """Finish what was begun and close everything."""
        ...

    async def add(
        self, session: Session, turns: Sequence[IndexedTurn] = (), *, fields: Collection[str] = DESCRIPTION
    ) -> Evicted:
        """Record turns of one rollout, all or none of them; or, without turns, describe a rollout.

        The parents of the turns are no longer open.

        Args:
            session: created if the store does not hold one of this id. If it does, turns set only
                `ambiguous`, and only to true; without turns its tenant, `explicit`, `created` and `fields`
                are replaced. All other fields are the store's own.
            fields: of its description; the others stay, so that concurrent calls keep each other's.

        Returns:
            what was evicted so that the limits hold. The rollout itself is evicted last, and only if it alone
            exceeds the limit.
        """
        ...

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """What is under each of the keys; those with nothing under them are missing.

        Evicted turns are found for a while, those of deleted sessions are not.
        """
        ...

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """Choose an open turn of a group that `find` returned, so that no other request takes it.

        A guarded store releases a turn that is claimed after its caller left.

        Returns:
            its id; None if requests have continued or claimed all of them.
        """
        ...

    async def release(self, turn: str) -> None:
        """Make a claimed turn open again, unless a turn that continues it was recorded meanwhile."""
        ...

    async def pin(self, rollout: str, until: float) -> bool:
        """Mark a rollout as used now, and keep it from eviction until a time in seconds since the epoch.

        The latest `until` counts. Returns False, and changes nothing, if there is no such rollout.
        """
        ...

    async def path(self, turn: str, limit: int = ALL) -> list[Turn]:
        """A turn and all it continues, in order, the last `limit` of them; empty if one of them is gone."""
        ...

    async def turns(self, rollout: str) -> list[Turn]:
        """All turns of a rollout in the order of their ids; empty if there is none."""
        ...

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """Ids of the newest turns of a rollout, newest first."""
        ...

    async def session(self, rollout: str) -> Session | None:
        """A session by its id."""
        ...

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: float = math.inf
    ) -> list[Session]:
        """Sessions, the last used first.

        Args:
            tenant: whose; None for all.
            before: only those with a smaller `used`.
        """
        ...

    async def delete(self, rollout: str) -> bool:
        """Remove a rollout with its turns and keys. False if there is none."""
        ...

    async def finish(self, rollout: str, cause: Cause, rewards: Mapping[str, float] | None = None) -> bool:
        """Put a rollout at the end of the feed, with the next revision.

        Args:
            rewards: set first; others stay. Rewards of turns alone finish only a rollout that is in the feed
                already. Those turns need not be recorded.

        Returns:
            whether it was put there: False if there is no such rollout, if it has no turns, or if it is in
            the feed and neither got turns nor changed a reward since.
        """
        ...

    async def feed(self, after: int, *, limit: int, tenant: str | None = None) -> FeedPage:
        """What the feed holds after a position.

        Args:
            limit: of the sessions that are returned.
            tenant: whose; None for all.
        """
        ...

    async def put(
        self,
        space: str,
        name: str,
        value: bytes | None,
        *,
        keep_s: float | None = None,
        before: Before = ...,
        most: int = ALL,
    ) -> bool:
        """Keep a value in place of the one before. Values that expire first are dropped if a space is full.

        Args:
            space: of names; `Limits.bytes_of` limits what some spaces hold.
            value: None removes the one that is there.
            keep_s: seconds after which it expires; None for never.
            before: change nothing if the value that is there is another one; None for no value, or one that
                cannot be read.
            most: change nothing if the name has no value and so many names of its group have one. A group
                are the names that are equal up to their last slash.

        Returns:
            whether it is kept: False too if it alone exceeds the limit of the space. For None, whether
            it removed a value: of several calls, one does.
        """
        ...

    async def get(
        self, space: str, names: Sequence[str] | None = None, *, complete: bool = False
    ) -> dict[str, bytes]:
        """The values of some names, or of all in the space; names without a value are missing.

        Args:
            complete: raise RecordDamaged in place of leaving out a value that cannot be read.
        """
        ...

    async def evict(self) -> Evicted:
        """Evict what is too old. Called from time to time."""
        ...
