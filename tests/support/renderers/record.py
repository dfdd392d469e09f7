"""Record what vLLM's renderers make of some conversations, for tests that run without vLLM.

    .venv/bin/python -m tests.support.renderers.record

Writes recorded.json next to this file: by layout and conversation, the text of the rendering with its special
tokens, without what the layout abridges, or the beginning of the engine's refusal.
"""

import json
from pathlib import Path

from tests.support.renderers.conversations import is_abridged, pieces_of, recorded_cells
from tests.support.renderers.engine import EngineRenderer, Refused
from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.models import MODELS
from tests.support.renderers.pieces import Unrenderable

FILE = Path(__file__).with_name("recorded.json")
_LENGTH_OF_REFUSAL = 90
NOT_RECORDED = ("mistral_v7", "kimi_k3")
"""The text of Mistral's ids has marks for spaces; Kimi's renderer is in no package."""


def record() -> dict[str, dict[str, str]]:
    """The text by layout and conversation; a refusal begins with its status."""
    recorded: dict[str, dict[str, str]] = {}
    for name in LAYOUTS:
        if name in NOT_RECORDED:
            continue
        engine, texts = EngineRenderer(MODELS[name]), recorded.setdefault(name, {})
        for cell in recorded_cells(name):
            try:
                ids = engine.consumed(cell.body)
                if is_abridged(name):
                    ids = ids[-len(engine.ids_of(pieces_of(name, cell))) :]
                texts[cell.name] = engine.text(ids)
            except (Refused, Unrenderable) as refusal:
                texts[cell.name] = str(refusal)[:_LENGTH_OF_REFUSAL]
    return recorded


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), ensure_ascii=False, indent=1) + "\n", "utf-8")
