"""Turns that wait to be recorded, because the store did not take them in time.

They are recorded in the order in which they came, as far as one rollout goes: a parent before its children.
Until then this process finds them here, next to what the store has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tokenproxy.record.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexEntry, Session
from tokenproxy.record.turn import Turn
from tokenproxy.store.packed import pack_entries, turn_size

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

    def __init__(self, most_turns: int, most_bytes: int) -> None:
        self._most_turns = most_turns
        self._most_bytes = most_bytes
        self._records: dict[int, Waiting] = {}
        """In the order in which they came."""
        self._number = self._size = 0
        self._rollouts: dict[str, dict[str, Turn]] = {}
        """The turns of each rollout, by their ids."""
        self._turns: dict[str, Turn] = {}
        self._keys: dict[bytes, dict[str, bytes]] = {}
        """Key of an index entry to the turns that it finds, each with the entry's ids."""

    def __len__(self) -> int:
        """How many turns wait."""
        return len(self._turns)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._records.values()))

    def put(self, record: Waiting) -> bool:
        """Add a record; False if the limits do not permit it."""
        if all(turn.id in self._turns for turn in record.turns):
            return True
        full = len(self) + len(record.turns) > self._most_turns
        if full or self._size + record.size > self._most_bytes:
            return False
        self._records[self._number] = record
        self._number += 1
        self._size += record.size
        for turn, entries in zip(record.turns, record.entries, strict=True):
            self._turns[turn.id] = self._rollouts.setdefault(record.session.id, {})[turn.id] = turn
            for entry in entries:
                self._keys.setdefault(entry.key, {})[turn.id] = entry.ids
        return True

    def next_batch(self) -> dict[int, Waiting]:
        """The records to try now, by number: of each rollout the oldest."""
        batch: dict[str, int] = {}
        for number, record in self._records.items():
            if len(batch) < _BATCH:
                batch.setdefault(record.session.id, number)
        return {number: self._records[number] for number in batch.values()}

    def remove(self, number: int) -> None:
        """Remove a record: it is in the store, or lost."""
        record = self._records.pop(number)
        self._size -= record.size
        for turn, entries in zip(record.turns, record.entries, strict=True):
            del self._turns[turn.id]
            self._rollouts[record.session.id].pop(turn.id, None)
            for entry in entries:
                self._keys.get(entry.key, {}).pop(turn.id, None)
                if not self._keys.get(entry.key):
                    self._keys.pop(entry.key, None)
        if not self._rollouts[record.session.id]:
            del self._rollouts[record.session.id]

    def is_continued(self, turn: str) -> bool:
        """Whether a turn here continues another one."""
        return any(each.parent == turn for each in self._turns.values())

    def look_up(self, keys: Sequence[bytes]) -> dict[bytes, list[tuple[bytes, Candidate]]]:
        """What is under some keys here: candidates with the ids of their entries, the oldest first."""
        return {
            key: [(ids, Candidate(turn, self._turns[turn].rollout)) for turn, ids in self._keys[key].items()]
            for key in (keys if self._turns else ())
            if key in self._keys
        }

    def find_too(
        self, found: dict[bytes, Found], here: Mapping[bytes, Sequence[tuple[bytes, Candidate]]]
    ) -> dict[bytes, Found]:
        """What a store found, with what `look_up` found before the store was read."""
        merged = dict(found)
        for key, candidates in here.items():
            for ids, candidate in candidates:
                merged[key] = _add(merged.get(key, Found(0, [])), ids, candidate)
        return merged

    def path(self, turn: str) -> list[Turn]:
        """The turn and those it continues, as far as they are here, the first one first."""
        path: list[Turn] = []
        current: str | None = turn
        while current is not None and current in self._turns:
            path.append(self._turns[current])
            current = path[-1].parent
        return path[::-1]

    def of_rollout(self, rollout: str) -> list[Turn]:
        """The turns of a rollout that are here."""
        return list(self._rollouts.get(rollout, {}).values())

    def session(self, rollout: str) -> Session | None:
        """The session that is created with the turns of a rollout."""
        if not (turns := self._rollouts.get(rollout)):
            return None
        session = next(record.session for record in self if record.session.id == rollout)
        return replace(session, turns=len(turns))


def _add(found: Found, ids: bytes, candidate: Candidate) -> Found:
    """What is under a key, with one more candidate; unchanged if the store has it meanwhile."""
    if any(each.turn == candidate.turn for group in found.groups for each in group.candidates):
        return found
    groups = {group.ids: group for group in found.groups}
    own = groups.pop(ids, CandidateGroup(ids, 0, []))
    own = CandidateGroup(ids, own.total + 1, [candidate, *own.candidates][:FOUND_AT_MOST])
    # a group that is cut off here makes the match ambiguous, as one that `find` cuts off
    return Found(found.total + 1, [own, *groups.values()][:FOUND_AT_MOST])
