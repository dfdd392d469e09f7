"""The layouts of vLLM's renderers give what vLLM was recorded to give."""

import json

import pytest

from tests.support.renderers.conversations import pieces_of, recorded_cells
from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.pieces import Unrenderable
from tests.support.renderers.record import FILE, NOT_RECORDED

RECORDED = json.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in NOT_RECORDED])
def test_layout_renders_as_recorded(layout: str) -> None:
    cells = list(recorded_cells(layout))
    assert {cell.name for cell in cells} == set(RECORDED[layout])
    for cell in cells:
        recorded = RECORDED[layout][cell.name]
        try:
            assert "".join(pieces_of(layout, cell)) == recorded, cell.name
        except Unrenderable as refusal:
            assert recorded.startswith("400") and str(refusal)[:30] in recorded, cell.name
