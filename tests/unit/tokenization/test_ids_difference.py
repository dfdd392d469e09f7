"""The hunks turn one list of ids into the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer.ids_difference import Hunk, common_prefix, difference

_IDS = st.lists(st.integers(0, 3), max_size=80)


@given(left=_IDS, right=_IDS)
def test_the_hunks_make_the_other_list(left: list[int], right: list[int]) -> None:
    hunks = difference(left, right)
    replaced = list(left)
    for hunk in reversed(hunks):
        replaced[hunk.start : hunk.end] = hunk.ids
    assert replaced == right
    ends = [place for hunk in hunks for place in (hunk.start, hunk.end)]
    assert ends == sorted(ends)
    assert all(hunk.ids or hunk.end > hunk.start for hunk in hunks)
    assert bool(hunks) == (left != right)
    length = common_prefix(np.array(left, np.int64), np.array(right, np.int32))
    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == min(len(left), len(right))


def test_a_hunk_holds_only_what_differs() -> None:
    assert difference([1, *range(10, 20)], [1, 5, 6, *range(10, 20)]) == [Hunk(1, 1, [5, 6])]
