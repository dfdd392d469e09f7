"""The index of a store: what finds turns, and what `Store.find` returns."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenproxy.record.turn import Turn

FOUND_AT_MOST = 16
"""Groups that `find` returns for one key, and turns that it returns for one group."""


class IndexEntry(NamedTuple):
    """One way in which a turn is found again."""

    key: bytes
    """16 bytes."""
    ids: bytes = b""
    """The turn's `ids_digest`, where a turn found by this key may be continued. Empty for keys that only
    explain why nothing was found."""


class IndexedTurn(NamedTuple):
    """A turn to be recorded."""

    turn: Turn
    entries: Sequence[IndexEntry] = ()
    """What finds it."""


class Candidate(NamedTuple):
    """A recorded turn that a request may continue."""

    turn: str
    """Its id; empty if it was evicted."""
    rollout: str
    """Empty if it was evicted."""


class CandidateGroup(NamedTuple):
    """The turns under one key that have equal ids."""

    ids: bytes
    """Their `ids_digest`; empty under keys that only explain."""
    total: int
    """How many there are; all that were evicted count as one."""
    candidates: list[Candidate]
    """At most FOUND_AT_MOST of them, the newest first, those that were evicted last."""

    @property
    def complete(self) -> bool:
        """Whether all of them were returned."""
        return self.total <= len(self.candidates)

    @property
    def in_one_rollout(self) -> bool:
        """Whether all of them belong to one rollout."""
        return self.complete and len({candidate.rollout for candidate in self.candidates}) == 1


class Found(NamedTuple):
    """What is under one key."""

    total: int
    """Of all groups, those not returned too."""
    groups: list[CandidateGroup]
    """At most FOUND_AT_MOST, in any order; `total` tells whether there are more."""

    @property
    def all_listed(self) -> bool:
        """Whether all groups were returned."""
        return self.total == sum(group.total for group in self.groups)

    def turns(self, rollout: str | None) -> list[Candidate]:
        """The turns that are there, of one rollout or of all."""
        listed = (candidate for group in self.groups for candidate in group.candidates)
        return [each for each in listed if each.turn and rollout in (None, each.rollout)]

    def of_rollout(self, rollout: str) -> "Found":
        """The turns that belong to a rollout."""
        groups = []
        for group in self.groups:
            kept = [candidate for candidate in group.candidates if candidate.rollout == rollout]
            groups.append(CandidateGroup(group.ids, len(kept), kept))
        return Found(sum(group.total for group in groups), groups)

    def with_candidate(self, ids: bytes, candidate: Candidate) -> "Found":
        """The same with one more turn; unchanged if it is there."""
        groups = {group.ids: group for group in self.groups}
        if any(candidate in group.candidates for group in groups.values()):
            return self
        own = groups.pop(ids, CandidateGroup(ids, 0, []))
        own = CandidateGroup(ids, own.total + 1, [candidate, *own.candidates][:FOUND_AT_MOST])
        # a group that is cut off here makes the match ambiguous, as one that `find` cuts off
        return Found(self.total + 1, [own, *groups.values()][:FOUND_AT_MOST])


NOTHING = Found(0, [])
