"""Merges what the partitions of a Redis store found under the same keys, to what one server would reply.

Of more than FOUND_AT_MOST groups under a key, a group that is returned may have turns in a partition that did
not list it: they count in the total of the key, and not in that of the group.
"""

from collections.abc import Iterable, Iterator, Sequence

from proxy.history.store import FOUND_AT_MOST, CandidateGroup, Found

FoundInPart = Sequence[tuple[int, int, list[tuple[str, CandidateGroup]]]]
"""As `redis_replies.read_dated_groups`."""


def merge_found(keys: Sequence[bytes], parts: Iterable[FoundInPart]) -> dict[bytes, Found]:
    """What all partitions found under the keys."""
    totals: dict[int, int] = {}
    groups: dict[int, dict[bytes, tuple[str, CandidateGroup]]] = {}
    for part in parts:
        for number, total, found in part:
            totals[number] = totals.get(number, 0) + total
            of_key = groups.setdefault(number, {})
            for newest, group in found:
                held = of_key.get(group.ids)
                of_key[group.ids] = (newest, group) if held is None else _merge(held, (newest, group))
    return {
        keys[number]: Found(totals[number], _newest_first(groups[number].values()))
        for number in sorted(totals)
    }


def turns_in(part: FoundInPart) -> Iterator[str]:
    """The turns that a partition found."""
    for _, _, found in part:
        for _, group in found:
            yield from (candidate.turn for candidate in group.candidates)


def _merge(
    first: tuple[str, CandidateGroup], second: tuple[str, CandidateGroup]
) -> tuple[str, CandidateGroup]:
    """Turns with equal ids of two partitions."""
    candidates = [*first[1].candidates, *second[1].candidates]
    candidates.sort(key=lambda candidate: (candidate.open, candidate.turn), reverse=True)
    total = first[1].total + second[1].total
    return max(first[0], second[0]), CandidateGroup(first[1].ids, total, candidates[:FOUND_AT_MOST])


def _newest_first(groups: Iterable[tuple[str, CandidateGroup]]) -> list[CandidateGroup]:
    ordered = sorted(groups, key=lambda group: group[0], reverse=True)
    return [group for _, group in ordered[:FOUND_AT_MOST]]
