from typing import Any

import pytest

from tokenization.tools import tools_for_template

_SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    "tool, expected",
    [
        (
            {"function": {"parameters": _SCHEMA, "x": 1, "name": "f"}, "y": 1, "type": "function"},
            {"type": "function", "function": {"name": "f", "description": None, "parameters": _SCHEMA}},
        ),
        (
            {"function": {"strict": False, "defer_loading": None, "description": "d", "name": "f"}},
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": None, "strict": False},
            },
        ),
        (
            {"defer_loading": True, "function": {"name": "f"}},
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": None, "defer_loading": True},
                "defer_loading": True,
            },
        ),
        ("f", "f"),
    ],
)
def test_conversion(tool: Any, expected: Any) -> None:
    converted = tools_for_template([tool])
    assert converted == [expected]
    # templates print tools as JSON, where the order of fields counts
    assert repr(converted) == repr([expected])


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools(tools: Any) -> None:
    assert tools_for_template(tools) is None
