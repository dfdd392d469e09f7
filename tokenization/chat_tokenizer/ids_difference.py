"""Where two lists of ids differ: the hunks that turn one into the other.

Law, for all lists: the hunks are in order and do not overlap, and with each in its place `left` is `right`.

Two renderings of one conversation are equal almost everywhere, so the search is greedy: after a difference
it looks for the next run of equal ids in windows that grow. That takes time linear in the ids if the
differences are short, and never more than `_WINDOW` doubled up to the length of the lists.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_RUN = 4
"""Ids in a row that must be equal after a difference, except at the end of both lists."""
_WINDOW = 64
"""Ids of each list that are searched first for such a run."""


class Hunk(NamedTuple):
    """`left[start:end]` is replaced by `ids`."""

    start: int
    end: int
    ids: list[int]


Ids = np.ndarray[tuple[int], np.dtype[np.signedinteger[Any]]]


def difference(left: Sequence[int], right: Sequence[int]) -> list[Hunk]:
    """The hunks that turn `left` into `right`; empty if they are equal. Not the fewest in all cases."""
    one, two = (np.asarray(ids, np.int64) for ids in (left, right))
    hunks: list[Hunk] = []
    i = j = 0
    while True:
        equal = common_prefix(one[i:], two[j:])
        i, j = i + equal, j + equal
        if i == len(one) and j == len(two):
            return hunks
        skipped, added = _next_run(one[i:], two[j:])
        hunks.append(Hunk(i, i + skipped, two[j : j + added].tolist()))
        i, j = i + skipped, j + added


def common_prefix(one: Ids, two: Ids) -> int:
    """The length of the longest common prefix of two arrays of ids."""
    size = min(len(one), len(two))
    start, step = 0, 256
    while start < size:  # in steps that grow: most differences are near, and most arrays are long
        end = min(size, start + step)
        differ = one[start:end] != two[start:end]
        if differ.any():
            return start + int(differ.argmax())
        start, step = end, step * 4
    return size


def _next_run(one: Ids, two: Ids) -> tuple[int, int]:
    """How many ids of each come before the nearest run of equal ids, or before their common end."""
    size = _WINDOW
    while True:
        found = _nearest_run(one[:size].tolist(), two[:size].tolist())
        if found is not None:
            return found
        if size >= max(len(one), len(two)):
            end = common_prefix(one[::-1], two[::-1])
            return len(one) - end, len(two) - end
        size *= 4


def _nearest_run(one: list[int], two: list[int]) -> tuple[int, int] | None:
    """The first positions of a run that both hold, with the smallest sum; None if there is none."""
    places: dict[tuple[int, ...], int] = {}
    for place in range(len(two) - _RUN + 1):
        places.setdefault(tuple(two[place : place + _RUN]), place)
    nearest: tuple[int, int] | None = None
    for place in range(len(one) - _RUN + 1):
        if nearest is not None and place >= sum(nearest):
            break
        other = places.get(tuple(one[place : place + _RUN]))
        if other is not None and (nearest is None or place + other < sum(nearest)):
            nearest = place, other
    return nearest
