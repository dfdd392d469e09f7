"""What the index of a store returned under some keys, and which of it may be the turn of a request."""

from collections.abc import Sequence

from proxy.history.cached_turn import CachedTurn
from proxy.history.conversation import Conversation
from proxy.history.store import CandidateGroup, Found
from proxy.history.text_index import BARE, EXACT


def of_rollout(group: CandidateGroup, rollout: str | None) -> CandidateGroup:
    """The turns of a group that belong to a rollout; all for None."""
    if rollout is None:
        return group
    kept = [candidate for candidate in group.candidates if candidate.rollout == rollout]
    return CandidateGroup(group.ids, len(kept), kept)


def count_turns(
    found: Sequence[tuple[bytes, Found | None]],
    groups: Sequence[Sequence[CandidateGroup]],
    rollout: str | None,
) -> int:
    """Number of turns under these keys; for one rollout, the number of listed ones."""
    if rollout is None:
        return sum(hits.total for _, hits in found if hits)
    return sum(group.total for of_key in groups for group in of_key)


def all_listed(hits: Found | None) -> bool:
    """Whether all groups under a key were returned."""
    return hits is None or hits.total == sum(group.total for group in hits.groups)


def lists_all(hits: Found | None) -> bool:
    """Whether all turns of the groups under a key were returned."""
    return hits is None or all(map(complete, hits.groups))


def complete(group: CandidateGroup) -> bool:
    """Whether all turns of a group were returned."""
    return group.total <= len(group.candidates)


def in_one_rollout(group: CandidateGroup) -> bool:
    """Whether all turns of a group belong to one rollout."""
    return complete(group) and len({candidate.rollout for candidate in group.candidates}) == 1


def continues(conversation: Conversation, end: int, turn: CachedTurn, kind: str) -> bool | None:
    """Check whether a turn found by a digest is the one that the client sent back.

    Returns:
        None if it is another; else whether the client repaired one of its tool calls.
    """
    if kind == EXACT:
        return False
    own = conversation.messages[end].message
    repaired = own.repairs(turn.calls) if kind == BARE else False
    if repaired is None or own.reasoning not in (b"", turn.lineage.reasonings[-1]):
        return None
    if turn.spelling_before == conversation.strict_before(end):
        return repaired  # spelled as in the request of that turn, and checked then
    sent = conversation.reasonings(0, end + 1)
    recorded = turn.lineage.all_reasonings()
    fits = len(sent) == len(recorded) and all(
        ours in (b"", theirs) for ours, theirs in zip(sent, recorded, strict=True)
    )
    return repaired if fits else None
