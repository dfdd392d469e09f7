"""What a store did not take in time, and will be offered again: turns, and documents (stored responses).

And how the store of this process does, for people.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import Any, Literal, NamedTuple

import msgspec

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import (
    DOCUMENTS,
    FULL,
    RecordRefused,
    Session,
    Store,
    StoreError,
    StoreStalled,
    Unreadable,
)
from tokenproxy.record.turn import Candidate, IndexedTurn, IndexEntry, Turn

log = logging.getLogger("tokenproxy")

_BATCH = 64
"""Records that are tried at once, each of another rollout."""
_NAMED = 16
"""Damaged records that `/ready` names."""


class Record(NamedTuple):
    """The arguments of one call that records turns."""

    session: Session
    turns: Sequence[IndexedTurn]
    size: int
    """Bytes that it takes in memory, roughly."""


Timed = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Counts and times a call of the store, given the method's name. Raises StoreStalled if it takes too long."""


class Backlog:
    """What waits, and what of it requests find meanwhile."""

    def __init__(self, metrics: Metrics, most_turns: int, most_bytes: int) -> None:
        """`most_bytes`: of the turns, and of the documents."""
        self.records: dict[str, Record] = {}
        """By the id of the first turn, in the order in which they came: parents before their children."""
        self.documents: dict[str, tuple[bytes, float | None]] = {}
        """By name: the document, and the seconds that it is kept."""
        self.lost = 0
        """Turns that were never recorded."""
        self._metrics = metrics
        self._most_turns = most_turns
        self._most_bytes = most_bytes

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.records or self.documents)

    def add(self, session: Session, turns: Sequence[IndexedTurn]) -> bool:
        """Let turns wait; False if too much waits already."""
        size = sum(len(msgspec.msgpack.encode(turn)) + 64 * len(entries) for turn, entries in turns)
        held = sum(record.size for record in self.records.values())
        if len(self.turns()) + len(turns) > self._most_turns or held + size > self._most_bytes:
            return False
        self.records[turns[0].turn.id] = Record(session, turns, size)
        return True

    def add_document(self, name: str, content: bytes, keep_s: float | None) -> bool:
        """Let a document wait; False if too much waits already."""
        held = sum(len(waiting) for waiting, _ in self.documents.values())
        if held + len(content) > self._most_bytes:
            return False
        self.documents[name] = (content, keep_s)
        return True

    def turns(self, rollout: str | None = None) -> dict[str, Turn]:
        """The turns of one rollout or of all, by their ids."""
        return {
            turn.id: turn
            for record in self.records.values()
            if rollout in (None, record.session.id)
            for turn, _ in record.turns
        }

    def holds(self, rollout: str) -> bool:
        """Whether turns of a rollout wait."""
        return rollout in [record.session.id for record in self.records.values()]

    def under(self, keys: Sequence[bytes]) -> list[tuple[IndexEntry, Candidate]]:
        """The turns under some keys of the index."""
        wanted = set(keys) if self.records else ()
        return [
            (entry, Candidate(turn.id, turn.rollout))
            for record in (self.records.values() if wanted else ())
            for turn, entries in record.turns
            for entry in dict.fromkeys(entries)
            if entry.key in wanted
        ]

    async def offer(self, store: Store, timed: Timed) -> None:
        """Offer what waits to the store, the turns of a rollout in their order.

        Raises:
            StoreError: some of it has to wait on.
        """
        errors = await asyncio.gather(*(self._record(record, store, timed) for record in self._oldest()))
        if error := next(filter(None, errors), None):
            raise error
        for name, (value, keep_s) in [*self.documents.items()][:_BATCH]:
            try:
                await timed("put", store.put(DOCUMENTS, name, value, keep_s=keep_s))
            except RecordRefused as error:
                log.error("a stored response is lost: %s", error)
            if self.documents.pop(name, None) is None:  # deleted in the meantime
                await timed("put", store.put(DOCUMENTS, name, None))

    def _oldest(self) -> list[Record]:
        """The first record of each rollout, for some rollouts."""
        first: dict[str, Record] = {}
        for record in self.records.values():
            first.setdefault(record.session.id, record)
        return list(first.values())[:_BATCH]

    async def _record(self, record: Record, store: Store, timed: Timed) -> StoreError | None:
        """Record turns that wait. Returns why they have to wait on."""
        session, turns, _ = record
        try:
            evicted = await timed("add", store.add(session, turns))
        except RecordRefused as error:
            self.count_lost(turns, "refused")
            log.error("a turn of %s is lost: %s", session.id, error)
        except StoreError as error:
            return error
        except Exception:  # the boundary: what cannot be recorded keeps no other turn waiting
            self.count_lost(turns, "refused")
            log.exception("a turn of %s is lost", session.id)
        else:
            evicted.report(self._metrics, FULL)
        del self.records[turns[0].turn.id]
        return None

    def count_lost(self, turns: Sized, reason: str) -> None:
        """Count turns that will not be recorded."""
        self.lost += len(turns)
        self._metrics.lost_turns.labels(reason).inc(len(turns))


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the store of one process does: a part of `/ready`."""

    state: Literal["ok", "stalled", "unavailable"]
    """`stalled`: it does not respond in time, or another process holds its lock; `unavailable`: it fails."""
    since: float | None
    """When that began, in seconds since the epoch; None if all is well."""
    error: str | None
    """Message of the last error."""
    queued_turns: int
    """Turns that wait to be recorded."""
    lost_turns: int
    """Turns that were never recorded, since the process started."""
    unreadable: int
    """Damaged records that were left out since the process started; the log names them."""
    unreadable_turns: list[str]
    """The ids of the first turns among them."""
    unreadable_records: list[str]
    """The first of the others, as `session NAME`, without their tenants."""

    @classmethod
    def of(
        cls, error: StoreError | None, since: float | None, backlog: Backlog, unreadable: Unreadable
    ) -> "StoreHealth":
        """The health of a store. `error`: the last one; None if all is well."""
        names = [name.partition(" ") for name in unreadable.names]
        turns = [name for kind, _, name in names if kind == "turn"]
        others = [f"{kind} {name.rpartition('/')[2]}" for kind, _, name in names if kind != "turn"]
        failing: Literal["stalled", "unavailable"]
        failing = "stalled" if isinstance(error, StoreStalled) else "unavailable"
        return cls(
            state="ok" if error is None else failing,
            since=since,
            error=None if error is None else str(error),
            queued_turns=len(backlog.turns()),
            lost_turns=backlog.lost,
            unreadable=len(names),
            unreadable_turns=turns[:_NAMED],
            unreadable_records=others[:_NAMED],
        )
