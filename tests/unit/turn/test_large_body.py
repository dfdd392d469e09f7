"""Long arrays of ids are converted without objects for ids, and to the same ids."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.turn.bodies import encoded, logprobs_of, read_completion, whole, whole_choice
from tokenproxy.record.completion import SampledChoice
from tokenproxy.turn import reader

_ODD = [-1, 2**31, 10**30, 1.5, True, [1], "1", None, "],"]


def _choice(body: bytes) -> SampledChoice:
    (choice,) = read_completion(body).choices
    return choice


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300),
    st.none() | st.sampled_from(_ODD),
    st.booleans(),
)
def test_ids_of_any_length_are_read(ids: list[Any], odd: Any, spaced: bool) -> None:
    ids = [*ids, odd, *ids] if odd is not None else ids
    body = encoded(whole(whole_choice(token_ids=ids)), spaced=spaced)
    fast = _choice(body)
    with patch.object(reader, "_ARRAY_FROM_BYTES", 2**60):
        plain = _choice(body)
    assert (fast.ids is None) == (plain.ids is None) == (odd is not None)
    assert list(fast.ids or ()) == list(plain.ids or ())
    assert (fast.unreadable, fast.message, fast.logprobs) == (plain.unreadable, plain.message, plain.logprobs)
    assert fast.raw_ids in (b"", encoded(ids))


@pytest.mark.parametrize("count", [300, 30_000])
def test_long_ids_are_kept_as_the_engine_wrote_them(count: int) -> None:
    ids = list(range(100_000, 100_000 + count))
    choice = _choice(encoded(whole(whole_choice(token_ids=ids, logprobs=logprobs_of(*[-0.5] * count)))))
    assert choice.raw_ids == encoded(ids)
    assert choice.ids is not None and choice.logprobs is not None
    assert (list(choice.ids), len(choice.logprobs)) == (ids, count)
