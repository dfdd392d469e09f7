"""Where turns are kept: one protocol, whatever holds them.

What every store promises:

- what a call changed is seen by every process that shares the store once the call has returned, and outlives
  the end of this process (the memory store has only one process, and does not outlive it);
- a turn is written once and never changed; writing the same turn again changes nothing;
- turns of one rollout leave together, oldest used rollout first, when the limits are exceeded, and the keys
  they were found by are remembered as evicted for a while.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from proxy.history.turn import Turn

FOUND_AT_MOST = 16
"""Turns that `find` gives for one key."""


class StoreError(Exception):
    """The store cannot be reached, or answered nonsense; the message says which and what to look at."""


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a rollout beside its turns."""

    id: str
    explicit: bool = True
    """Whether a client named it; False for the rollout of a conversation without a session."""
    created: float
    """Seconds since the epoch."""
    used: float
    """When a turn was last added or its description last saved, in seconds since the epoch."""
    turns: int = 0
    size: int = 0
    """Bytes its turns take, as the store counts them."""
    defaults: bytes = b"{}"
    """JSON object: fields of a chat request that hold where a request does not set them."""
    overrides: bytes = b"{}"
    """JSON object: fields of a chat request that hold whatever a request says."""
    metadata: bytes = b"{}"
    """JSON object: the client's own words on it."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request was answered, kept for a while so that a retry gets the same."""

    id: str
    """Sorts by time, as `turn.new_id`."""
    key: bytes
    """What it is found by."""
    request: bytes = b""
    """Digest of everything that was asked."""
    failed: bool = False
    """Whether the client got an error, or left: then the next retry of an equal request runs anew."""
    turns: tuple[str, ...] = ()
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    """What was sent, compressed with zlib; empty if it was too long to keep."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a store holds."""

    max_bytes: int = 2**30
    """Of turns. Exceeded, the oldest used rollouts go until nine tenths are left."""
    max_age_s: float = 7 * 86400.0
    """A rollout that was not used for so long goes."""
    answer_age_s: float = 600.0
    """How long answers are kept."""
    answer_bytes: int = 128 * 2**20
    """Of answers; the oldest go first."""
    evicted_keys: int = 200_000
    """How many keys of evicted turns are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds."""

    rollouts: int
    turns: int
    size: int
    """Bytes of turns."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What left a store."""

    rollouts: int = 0
    turns: int = 0
    size: int = 0


class Store(Protocol):
    """Keeps turns, sessions, rewards and answers. Every method may raise StoreError.

    A store is made outside an event loop and used in one; `open` comes first.
    """

    async def open(self) -> None:
        """Connect, and make what must exist."""
        ...

    async def aclose(self) -> None:
        """Finish what was begun and let go of everything."""
        ...

    async def add(self, turns: Sequence[Turn], keys: Sequence[Sequence[bytes]]) -> Evicted:
        """Record turns, all or none of them.

        Args:
            turns: of one rollout, whose session is made where there is none: explicit unless `made_up`.
            keys: for each turn the 16-byte keys under which `find` finds it.

        Returns:
            what had to leave so that the limits hold. The turns' own rollout goes last, and only if it alone
            takes more than all may.
        """
        ...

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """For each key that is known, the ids of its turns, newest first, at most FOUND_AT_MOST."""
        ...

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys whose turns were evicted. A deleted session's are not among them."""
        ...

    async def path(self, turn_id: str) -> list[Turn]:
        """A turn and all it continues, the first turn first; empty if one of them is missing."""
        ...

    async def turns(self, rollout: str) -> list[Turn]:
        """All turns of a rollout in the order of their ids; empty if there is none."""
        ...

    async def save_session(self, session: Session) -> None:
        """Make or describe a session: all is taken over but `turns` and `size`, which are the store's own."""
        ...

    async def session(self, rollout: str) -> Session | None:
        """A session or rollout."""
        ...

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        """Sessions and rollouts, the last used first; with `before`, those used earlier than that."""
        ...

    async def delete(self, rollout: str) -> bool:
        """Remove a rollout with its turns, keys, rewards. False if there is none."""
        ...

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> None:
        """Set the reward of turns, by their id, or of the whole rollout, by "". Others stay.

        The turns need not be known. The rollout's session is made where there is none.
        """
        ...

    async def rewards(self, rollout: str) -> dict[str, float]:
        """The rewards of a rollout, as `set_rewards` took them."""
        ...

    async def keep_response(self, answer: StoredResponse) -> None:
        """Keep an answer for as long as the limits say."""
        ...

    async def answers(self, key: bytes) -> list[StoredResponse]:
        """The answers under a key that were not taken, newest first."""
        ...

    async def take_response(self, answer: StoredResponse) -> bool:
        """Take an answer out, so that nobody finds it again. False if somebody else was faster."""
        ...

    async def evict(self) -> Evicted:
        """Let go of what is too old or too much. Called now and then."""
        ...

    async def usage(self) -> Usage:
        """How much is held."""
        ...
