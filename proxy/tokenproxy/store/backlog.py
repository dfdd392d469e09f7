"""What a store did not take in time, and will be offered again: turns, and documents (stored responses)."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tokenproxy.record.store import (
    FOUND_AT_MOST,
    Candidate,
    CandidateGroup,
    Found,
    IndexedTurn,
    IndexEntry,
    Session,
)
from tokenproxy.record.turn import Turn


class Record(NamedTuple):
    """The arguments of one call that records turns."""

    session: Session
    turns: Sequence[IndexedTurn]
    size: int
    """Bytes that it takes in memory, roughly."""


class Backlog:
    """What waits, and what of it requests find meanwhile."""

    def __init__(self, most_turns: int, most_bytes: int) -> None:
        """`most_bytes`: of the turns, and of the documents."""
        self.records: dict[str, Record] = {}
        """By the id of the first turn, in the order in which they came: parents before their children."""
        self.documents: dict[str, tuple[bytes, float | None]] = {}
        """By name: the document, and the seconds that it is kept."""
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

    def oldest(self, limit: int) -> list[Record]:
        """The first record of each rollout, for some rollouts."""
        first: dict[str, Record] = {}
        for record in self.records.values():
            if len(first) < limit:
                first.setdefault(record.session.id, record)
        return list(first.values())

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


def with_candidate(found: Found, ids: bytes, candidate: Candidate) -> Found:
    """What is under a key, with one more candidate; unchanged if the store has it meanwhile."""
    groups = {group.ids: group for group in found.groups}
    if any(candidate in group.candidates for group in groups.values()):
        return found
    own = groups.pop(ids, CandidateGroup(ids, 0, []))
    own = CandidateGroup(ids, own.total + 1, [candidate, *own.candidates][:FOUND_AT_MOST])
    # a group that is cut off here makes the match ambiguous, as one that `find` cuts off
    return Found(found.total + 1, [own, *groups.values()][:FOUND_AT_MOST])
