"""Many random trees of turns."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.dialects.test_chat_trees import STEP, check_tree
from tests.support.fake_vllm import Variant
from tests.support.tiny_model import TinyModel
from tests.support.utils import Pair


@settings(max_examples=300)
@given(steps=st.lists(STEP, min_size=2, max_size=8))
def test_every_turn_continues_the_exact_ids_of_its_parent(
    pairs: Callable[[Variant], Pair], tiny_model: TinyModel, steps: list[dict[str, Any]]
) -> None:
    check_tree(pairs, tiny_model, steps)
