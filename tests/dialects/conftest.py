from collections.abc import Callable
from typing import Any

import pytest

from tests.dialects.talk import Talk
from tests.tiny_model import TinyModel
from tests.utils import Pair


@pytest.fixture
def talk(pair: Pair, tiny_model: TinyModel) -> Callable[..., Talk]:
    """Makes conversations with the shared pair."""

    def make(**fields: Any) -> Talk:
        return Talk(pair, tiny_model, **fields)

    return make
