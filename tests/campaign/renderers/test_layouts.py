"""The layouts of tests/support/renderers render as vLLM's own renderers do, and refuse what they refuse."""

from collections.abc import Iterator

import pytest

from tests.support.renderers.conversations import cells, is_abridged, pieces_of
from tests.support.renderers.engine import EngineRenderer, Refused
from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.models import MODELS
from tests.support.renderers.pieces import Unrenderable

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=[name for name in LAYOUTS if name in MODELS])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, EngineRenderer]]:
    """The name of a layout, and the engine's renderer of its model."""
    yield request.param, EngineRenderer(MODELS[request.param])


def test_layout_renders_like_the_engine(engine: tuple[str, EngineRenderer]) -> None:
    name, renderer = engine
    different = []
    for cell in cells(name):
        real: list[int] | str
        try:
            real = renderer.consumed(cell.body)
        except Refused as refused:
            real = str(refused)
        try:
            ids = renderer.ids_of(pieces_of(name, cell))
        except Unrenderable as refusal:
            same = isinstance(real, str) and str(refusal)[:30] in real
        else:
            end = real[-len(ids) :] if is_abridged(name) else real
            same = end == ids
        if not same:
            different.append(cell.name)
    assert not different
