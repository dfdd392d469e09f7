"""Turns that wait to be recorded, because the store did not take them in time.

They are recorded in the order in which they came, as far as one rollout goes: a parent before its children.
Until then this process finds them here: `find_too`, `path`, `of_rollout` put them next to what the store has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from proxy.history.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexEntry, Session
from proxy.history.turn import Turn
from proxy.stores.packed import pack_entries, turn_size

MOST_TURNS = 10_000
MOST_BYTES = 128 * 2**20
_BATCH = 64
"""Records that are tried at once, each of another rollout."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The arguments of one call that records turns."""

    session: Session
    turns: Sequence[Turn]
    entries: Sequence[Sequence[IndexEntry]]

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, roughly."""
        pairs = zip(self.turns, self.entries, strict=True)
        return sum(turn_size(turn) + len(pack_entries(entries)) for turn, entries in pairs)


class WaitingTurns:
    """A bounded queue, and an index of what is in it."""

    def __init__(self, most_turns: int = MOST_TURNS, most_bytes: int = MOST_BYTES) -> None:
        self._most_turns = most_turns
        self._most_bytes = most_bytes
        self._records: dict[int, tuple[Waiting, int]] = {}
        """With the bytes of each, in the order in which they came."""
        self._number = 0
        self._size = 0
        self._turns: dict[str, tuple[Turn, Sequence[IndexEntry]]] = {}
        self._keys: dict[bytes, dict[str, bytes]] = {}
        """Key of an index entry to the turns that it finds, each with the entry's ids."""
        self._rollouts: dict[str, list[str]] = {}
        """Ids of the turns of each rollout."""
        self._parents: dict[str, int] = {}
        """How many turns here continue a turn."""

    def __len__(self) -> int:
        """How many turns wait."""
        return len(self._turns)

    def __iter__(self) -> Iterator[Waiting]:
        return iter([record for record, _ in self._records.values()])

    def has_rollout(self, rollout: str) -> bool:
        """Whether turns of a rollout wait."""
        return rollout in self._rollouts

    def has_turn(self, turn: str) -> bool:
        """Whether a turn waits."""
        return turn in self._turns

    def turn(self, turn: str) -> Turn | None:
        """A turn, if it waits."""
        return self._turns[turn][0] if turn in self._turns else None

    def put(self, record: Waiting) -> bool:
        """Add a record; False if the limits do not permit it."""
        if all(turn.id in self._turns for turn in record.turns):
            return True
        size = record.size
        if len(self._turns) + len(record.turns) > self._most_turns or self._size + size > self._most_bytes:
            return False
        self._records[self._number] = (record, size)
        self._number += 1
        self._size += size
        for turn, entries in zip(record.turns, record.entries, strict=True):
            self._turns[turn.id] = (turn, entries)
            self._rollouts.setdefault(turn.rollout, []).append(turn.id)
            for entry in entries:
                self._keys.setdefault(entry.key, {})[turn.id] = entry.ids
            if turn.parent is not None:
                self._parents[turn.parent] = self._parents.get(turn.parent, 0) + 1
        return True

    def next_batch(self) -> dict[int, Waiting]:
        """The records to try now, by number: of each rollout the oldest."""
        batch: dict[int, Waiting] = {}
        rollouts: set[str] = set()
        for number, (record, _) in self._records.items():
            if record.session.id not in rollouts:
                rollouts.add(record.session.id)
                batch[number] = record
                if len(batch) == _BATCH:
                    break
        return batch

    def remove(self, number: int) -> None:
        """Remove a record: it is in the store, or lost."""
        record, size = self._records.pop(number)
        self._size -= size
        for turn in record.turns:
            _, entries = self._turns.pop(turn.id)
            _discard(self._rollouts, turn.rollout, turn.id)
            for entry in entries:
                found = self._keys.get(entry.key, {})
                found.pop(turn.id, None)
                if not found:
                    self._keys.pop(entry.key, None)
            if turn.parent is not None:
                self._parents[turn.parent] -= 1
                if not self._parents[turn.parent]:
                    del self._parents[turn.parent]

    def look_up(self, keys: Sequence[bytes]) -> dict[bytes, list[tuple[bytes, Candidate]]]:
        """What is under some keys here: candidates with the ids of their entries, the oldest first."""
        if not self._turns:
            return {}
        return {
            key: [
                # a turn that is not in the store cannot be claimed
                (ids, Candidate(turn, self._turns[turn][0].rollout, open=False))
                for turn, ids in self._keys[key].items()
            ]
            for key in keys
            if key in self._keys
        }

    def find_too(
        self, found: dict[bytes, Found], here: Mapping[bytes, Sequence[tuple[bytes, Candidate]]]
    ) -> dict[bytes, Found]:
        """What a store found, with what `look_up` found before the store was read."""
        if not here and not self._parents:
            return found
        merged = {key: self._close_continued(hits) for key, hits in found.items()}
        for key, candidates in here.items():
            for ids, candidate in candidates:
                merged[key] = _add(merged.get(key, Found(0, [])), ids, candidate)
        return merged

    def path(self, turn: str) -> list[Turn]:
        """The turn and those it continues, as far as they are here, the first one first."""
        path: list[Turn] = []
        current: str | None = turn
        while current is not None and current in self._turns:
            path.append(self._turns[current][0])
            current = path[-1].parent
        return path[::-1]

    def of_rollout(self, rollout: str) -> list[Turn]:
        """The turns of a rollout that are here."""
        return [self._turns[turn][0] for turn in self._rollouts.get(rollout, ())]

    def session(self, rollout: str) -> Session | None:
        """The session that is created with the turns of a rollout."""
        turns = self._rollouts.get(rollout)
        if not turns:
            return None
        session = next(record.session for record in self if record.session.id == rollout)
        return replace(session, turns=len(turns))

    def _close_continued(self, found: Found) -> Found:
        """Close the candidates of the store that have a continuation which waits here."""
        return Found(
            found.total,
            [
                CandidateGroup(
                    group.ids,
                    group.total,
                    [
                        each._replace(open=each.open and each.turn not in self._parents)
                        for each in group.candidates
                    ],
                )
                for group in found.groups
            ],
        )


def _add(found: Found, ids: bytes, candidate: Candidate) -> Found:
    """What is under a key, with one more candidate; unchanged if the store has it meanwhile."""
    listed = {each.turn for group in found.groups for each in group.candidates}
    if candidate.turn in listed:
        return found
    groups = []
    own = CandidateGroup(ids, 0, [])
    for group in found.groups:
        if group.ids == ids:
            own = group
        else:
            groups.append(group)
    own = CandidateGroup(ids, own.total + 1, [*own.candidates, candidate][:FOUND_AT_MOST])
    # it was added last. A group that is cut off here makes the match ambiguous, as one that `find` cuts off
    return Found(found.total + 1, [own, *groups][:FOUND_AT_MOST])


def _discard(lists: dict[str, list[Any]], key: str, value: object) -> None:
    lists[key].remove(value)
    if not lists[key]:
        del lists[key]
