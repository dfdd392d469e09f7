"""Sessions of a damaged store: what can be read is shown, and nothing is made up."""

import json
import math
from typing import Any

import msgspec
import pytest

from proxy.history.store import Session
from proxy.history.turn import Turn
from proxy.viewer.tree import session_tree
from tests.support.trees import child, root

_DAMAGED = [b"broken", b'["\xff"]', b"[" * 5000 + b"]" * 5000]


def _read(turns: list[Turn], metadata: bytes = b"{}") -> dict[str, Any]:
    """The session as the page reads it."""
    session = Session(id="s", created=1.0, used=2.0, metadata=metadata)
    body = msgspec.json.encode(session_tree(session, turns, {}, -math.inf))
    read: dict[str, Any] = json.loads(body.decode())
    return read


@pytest.mark.parametrize("damaged", _DAMAGED)
@pytest.mark.parametrize("field, empty", [("messages", []), ("message", {})])
def test_other_turns_are_shown_next_to_damaged_json(field: str, empty: object, damaged: bytes) -> None:
    sound = root("a", [1, 2], [3])
    read = _read([sound, child("b", sound, [4], [5], **{field: damaged})], damaged)
    assert read["turns"][0]["message"]["content"] == "from a"
    assert read["turns"][1][field] == empty
    assert read["session"]["metadata"] == {}
