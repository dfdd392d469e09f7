"""The hunks turn one list of ids into the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization.ids_difference import Hunk, apply, common_prefix, difference

_IDS = st.lists(st.integers(0, 3), max_size=80)


@given(left=_IDS, right=_IDS)
def test_the_hunks_make_the_other_list(left: list[int], right: list[int]) -> None:
    hunks = difference(left, right)
    assert apply(left, hunks) == right
    ends = [place for hunk in hunks for place in (hunk.start, hunk.end)]
    assert ends == sorted(ends)
    assert all(hunk.ids or hunk.end > hunk.start for hunk in hunks)
    assert bool(hunks) == (left != right)
    length = common_prefix(np.array(left, np.int64), np.array(right, np.int32))
    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == min(len(left), len(right))


@pytest.mark.parametrize(
    "left, right, expected",
    [
        ([1, 2, 3, 4], [1, 2], [Hunk(2, 4, [])]),
        ([1, *range(10, 20)], [1, 5, 6, *range(10, 20)], [Hunk(1, 1, [5, 6])]),
        ([*range(5_000)], [*range(5_000, 10_000)], [Hunk(0, 5_000, [*range(5_000, 10_000)])]),
    ],
)
def test_known_differences(left: list[int], right: list[int], expected: list[Hunk]) -> None:
    assert difference(left, right) == expected


def test_many_short_differences() -> None:
    left = [(place * 7919) % 50_021 for place in range(25_600)]
    right = list(left)
    for place in reversed(range(0, 25_600, 256)):
        right[place : place + 3] = [60_000 + place]
    hunks = difference(left, right)
    assert len(hunks) == 100
    assert apply(left, hunks) == right
