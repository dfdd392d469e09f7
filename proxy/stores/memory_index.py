"""The index of a memory store: which turns are under which key."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from proxy.history.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexEntry


@dataclass(slots=True)
class _Group:
    """The turns under one key that have equal ids; both lists are sorted."""

    open: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.open) + len(self.closed)

    @property
    def newest(self) -> str:
        return max(*self.open[-1:], *self.closed[-1:], "")


class MemoryIndex:
    """Maps keys to groups of turns."""

    def __init__(self) -> None:
        self._groups: dict[bytes, dict[bytes, _Group]] = {}

    def put(self, turn: str, entries: Iterable[IndexEntry]) -> None:
        """Add an open turn to the index."""
        for key, ids in entries:
            insort(self._groups.setdefault(key, {}).setdefault(ids, _Group()).open, turn)

    def set_open(self, turn: str, entries: Iterable[IndexEntry], open: bool) -> None:
        """Make a turn open, or no longer open."""
        for key, ids in entries:
            group = self._groups[key][ids]
            source, target = (group.closed, group.open) if open else (group.open, group.closed)
            _remove(source, turn)
            insort(target, turn)

    def remove(self, turn: str, entries: Iterable[IndexEntry], open: bool) -> None:
        """Remove a turn from the index."""
        for key, ids in entries:
            groups = self._groups[key]
            group = groups[ids]
            _remove(group.open if open else group.closed, turn)
            if not group:
                del groups[ids]
            if not groups:
                del self._groups[key]

    def find(self, key: bytes, rollout_of: Callable[[str], str]) -> Found | None:
        """What is under a key; None if that is nothing.

        Args:
            rollout_of: returns the rollout of a turn.
        """
        groups = self._groups.get(key)
        if not groups:
            return None
        newest = heapq.nlargest(FOUND_AT_MOST, groups.items(), key=lambda item: item[1].newest)
        return Found(
            sum(map(len, groups.values())),
            [CandidateGroup(ids, len(group), _candidates(group, rollout_of)) for ids, group in newest],
        )

    def turns_to_flag(self, key: bytes) -> list[str]:
        """Turns whose rollouts become ambiguous if another rollout adds a turn with ids under this key.

        Returns all turns without ids, and one turn with ids. One is enough: if turns with ids belong to
        several rollouts, all of those became ambiguous when the second was added.
        """
        groups = self._groups.get(key, {})
        without_ids = groups.get(b"")
        turns = without_ids.open + without_ids.closed if without_ids else []
        with_ids = next((group for ids, group in groups.items() if ids), None)
        return [*turns, with_ids.newest] if with_ids else turns


def _candidates(group: _Group, rollout_of: Callable[[str], str]) -> list[Candidate]:
    open = [Candidate(turn, rollout_of(turn), True) for turn in _newest(group.open, FOUND_AT_MOST)]
    rest = FOUND_AT_MOST - len(open)
    return open + [Candidate(turn, rollout_of(turn), False) for turn in _newest(group.closed, rest)]


def _newest(turns: list[str], limit: int) -> list[str]:
    return turns[: -limit - 1 : -1]


def _remove(turns: list[str], turn: str) -> None:
    del turns[bisect_left(turns, turn)]
