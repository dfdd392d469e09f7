from typing import Any

import pytest

from tokenization.tools import tools_for_template

_SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    "tool, function",
    [
        (
            {"function": {"parameters": _SCHEMA, "x": 1, "name": "f"}, "y": 1, "type": "function"},
            {"name": "f", "description": None, "parameters": _SCHEMA},
        ),
        (
            {"function": {"strict": False, "defer_loading": None, "description": "d", "name": "f"}},
            {"name": "f", "description": "d", "parameters": None, "strict": False},
        ),
    ],
)
def test_conversion(tool: Any, function: Any) -> None:
    # templates print tools as JSON, where the order of fields counts
    assert repr(tools_for_template([tool])) == repr([{"type": "function", "function": function}])
    assert tools_for_template([]) is None
