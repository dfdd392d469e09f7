"""Turns are found by the ids that a prompt begins with."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.recording import scope_of
from tokenproxy.record.identity import ids_entries, prefix_keys
from tokenproxy.record.turn import pack_ids

_SCOPE = scope_of("s")


def _ids(count: int) -> list[int]:
    return random.Random(7).choices(range(1000), k=count)


@given(turn=st.integers(1, 5000), added=st.integers(0, 5000))
def test_a_prompt_has_the_key_of_each_turn_that_it_begins_with(turn: int, added: int) -> None:
    ids = _ids(turn + added)
    key = ids_entries(_SCOPE, pack_ids(ids[:turn]), b"")[0].key
    assert key in prefix_keys(_SCOPE, pack_ids(ids))
