"""Where turns are kept: one protocol for memory, SQLite and Redis.

What every store promises:

- what a call changed is visible to every process that shares the store once the call has returned, and
  survives the end of this process (the memory store has only one process, and does not survive it);
- a turn is written once; writing the same turn again changes nothing;
- the limits hold after every call that adds something, with no other call: the rollouts used least
  recently are evicted, each with all its turns, and the keys they were found by are remembered as evicted for
  a while. A pinned rollout is never evicted.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import msgspec

from proxy.history.turn import Turn

if TYPE_CHECKING:
    from proxy.history.documents import DocumentStore
    from proxy.history.feed import FeedStore
    from proxy.metrics import Metrics

log = logging.getLogger("tokenproxy")

FOUND_AT_MOST = 16
"""Groups that `find` returns for one key, and turns that it returns for one group."""

MAX_DESCRIPTION_BYTES = 65_536
"""Of a session's defaults, overrides and metadata together."""

SECRET_BYTES = 32
"""Of `Store.secret`."""


class StoreError(Exception):
    """The store cannot be reached, or returned something unreadable; the message says what to check."""

    level: ClassVar[int] = logging.ERROR
    """At which a caller logs it."""

    def report(self, metrics: "Metrics", consequence: str) -> None:
        """Count and log that a caller goes on without the store."""
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


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout: what the store holds of it next to its turns."""

    id: str
    """Unique in the store: see `session_id`."""
    tenant: str = ""
    """Digest of the credential it belongs to; empty if no credential is required."""
    explicit: bool = True
    """Whether a client named it; False for the rollout of a conversation without a session."""
    ambiguous: bool = False
    """Whether another rollout ever held an equal conversation, so that requests may have been confused."""
    created: float
    """Seconds since the epoch."""
    used: float
    """When a turn was last added or matched or its description last saved, in seconds since the epoch."""
    turns: int = 0
    size: int = 0
    """Bytes its turns and its description take in the store, which may compress them."""
    defaults: bytes = b"{}"
    """JSON object: fields of a chat request that apply where a request does not set them."""
    overrides: bytes = b"{}"
    """JSON object: fields of a chat request that replace those of a request."""
    metadata: bytes = b"{}"
    """JSON object of the client's own."""

    @property
    def name(self) -> str:
        """The id without the tenant: what clients know."""
        return self.id.removeprefix(f"{self.tenant}/") if self.tenant else self.id


def session_id(tenant: str, name: str) -> str:
    """The id of a tenant's session in a store. Names hold no slash, so two tenants never share an id."""
    return f"{tenant}/{name}" if tenant else name


class IndexEntry(NamedTuple):
    """One way in which a turn is found again."""

    key: bytes
    """16 bytes."""
    ids: bytes = b""
    """The turn's `ids_digest`, where a turn found by this key may be continued. Empty for keys that only
    explain why nothing was found."""


class Candidate(NamedTuple):
    """A recorded turn that a request may continue."""

    turn: str
    rollout: str
    open: bool
    """Whether no request has continued or claimed it yet."""


class CandidateGroup(NamedTuple):
    """The turns under one key that have equal ids."""

    ids: bytes
    """Their `ids_digest`; empty under keys that only explain."""
    total: int
    """How many there are."""
    candidates: list[Candidate]
    """At most FOUND_AT_MOST of them: open ones before others, then the newest first."""


class Found(NamedTuple):
    """What is under one key."""

    total: int
    """Turns in all groups, those not returned too."""
    groups: list[CandidateGroup]
    """At most FOUND_AT_MOST, the group with the newest turn first; `total` tells whether there are more."""


class Cursor(NamedTuple):
    """A place in the list of sessions, by use."""

    used: float
    id: str


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The response to a request, kept for a while so that a retry gets the same."""

    id: str
    """Sorts by time, as `turn.new_id`."""
    key: bytes
    """What it is found by."""
    request: bytes = b""
    """Digest of the whole request."""
    failed: bool = False
    """Whether the client got an error or left: then the next retry of an equal request runs anew."""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    """What was sent, compressed with zlib."""


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
    """How many keys of evicted turns are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much a store holds."""

    rollouts: int
    turns: int
    size: int
    """Bytes of turns and session descriptions."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What left a store."""

    rollouts: int = 0
    turns: int = 0
    size: int = 0
    undelivered: int = 0
    """Finished rollouts among them that a consumer of the feed has not acknowledged."""


class Store(Protocol):
    """Keeps turns, sessions, rewards, responses, and changes of fleets. Every method may raise StoreError.

    A store is made outside an event loop and used in one; `open` comes first.
    """

    @property
    def feed(self) -> "FeedStore":
        """The rollouts that are finished."""
        ...

    @property
    def documents(self) -> "DocumentStore":
        """What is stored besides turns."""
        ...

    async def open(self) -> None:
        """Connect, and create what must exist."""
        ...

    async def aclose(self) -> None:
        """Finish what was begun and close everything."""
        ...

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """Record turns of one rollout, all or none of them.

        The parents of the turns are no longer open. Where an entry has `ids` and its key already finds a turn
        of another rollout, both sessions become ambiguous; so does the session of a turn whose reason is
        `ambiguous`. A store that keeps rollouts in several places looks for other rollouts in the others only
        if the session is not explicit: the keys of an explicit session are its own.

        Args:
            session: created if the store does not hold one of this id; if it does, only `used` is updated.
            entries: for each turn what finds it.

        Returns:
            what was evicted so that the limits hold. The rollout itself is evicted last, and only if it alone
            exceeds the limit.
        """
        ...

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """What is under each of the keys; those with nothing under them are missing.

        Args:
            rollout: the only one whose turns count; None for all. Turns of others may be returned too, but a
                store that keeps rollouts in several places looks only where this one is.
        """
        ...

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys whose turns were evicted. A deleted session's are not among them."""
        ...

    async def claim(self, turn: str) -> bool:
        """Make a turn no longer open, so that no other request takes it. False if it was not open."""
        ...

    async def release(self, turn: str) -> None:
        """Make a claimed turn open again, unless a turn that continues it was recorded meanwhile."""
        ...

    async def pin(self, rollout: str, until: float) -> None:
        """Mark a rollout as used now, and keep it from eviction until a time in seconds since the epoch.

        Nothing happens if there is no such rollout. The latest `until` counts.
        """
        ...

    async def path(self, turn: str) -> list[Turn]:
        """A turn and all it continues, the first turn first; empty if one of them is missing."""
        ...

    async def turns(self, rollout: str) -> list[Turn]:
        """All turns of a rollout in the order of their ids; empty if there is none."""
        ...

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """Ids of the newest turns of a rollout, newest first."""
        ...

    async def save_session(self, session: Session) -> Evicted:
        """Create or describe a session. `turns`, `size` and `ambiguous` stay the store's own.

        Returns:
            what was evicted so that the limits hold.
        """
        ...

    async def session(self, rollout: str) -> Session | None:
        """A session by its id."""
        ...

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """Sessions in descending order of (used, id).

        Args:
            tenant: whose; None for all.
            before: only those after this place in the order.
        """
        ...

    async def delete(self, rollout: str) -> bool:
        """Remove a rollout with its turns, keys, rewards. False if there is none."""
        ...

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """Set the reward of turns, by their id, or of the whole rollout, by "". Others stay.

        In the same step, the reward of the whole rollout finishes it, as `FeedStore.finish` does. A rollout
        that is in the feed already is finished again if any reward changed.

        Returns False, and sets nothing, if there is no such rollout. The turns need not be recorded.
        """
        ...

    async def rewards(self, rollout: str) -> dict[str, float]:
        """The rewards of a rollout, as `set_rewards` took them."""
        ...

    async def keep_response(self, response: StoredResponse) -> None:
        """Keep a response for as long as the limits allow."""
        ...

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """The responses under a key that were not taken, newest first."""
        ...

    async def take_response(self, response: StoredResponse) -> bool:
        """Remove a response, so that it is not found again. False if another call removed it first."""
        ...

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """The changes of a fleet by the URLs of its replicas, as `change_replica` took them."""
        ...

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """Keep a change of a replica in place of the one before; None forgets it. No limit evicts changes.

        Args:
            fleet: name of the fleet; each has its own changes.
            change: a word, which the store does not read.
        """
        ...

    async def secret(self) -> bytes:
        """32 random bytes, the same for all processes that share the store; made at the first call."""
        ...

    async def evict(self) -> Evicted:
        """Evict what is too old, of responses, documents and consumers too. Called from time to time."""
        ...

    async def usage(self) -> Usage:
        """How much is held."""
        ...
