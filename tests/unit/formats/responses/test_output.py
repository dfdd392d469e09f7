"""Output items from the pieces of a message, in every order in which engines send them."""

from typing import Any

import pytest

from tokenproxy.base.errors import EngineBroken
from tokenproxy.formats.responses.items import Names
from tokenproxy.formats.responses.output import Output
from tokenproxy.formats.responses.request import Tools

_BASE = "a" * 32


def _call(index: int, call: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call, "function": function}]}


def _output(*parts: dict[str, Any]) -> tuple[Output, list[dict[str, Any]]]:
    made = Output(Names(_BASE), Tools(), summary=False, encrypted=False)
    events = [event for part in parts for event in made.add(part, "", [])]
    made.end("completed", events)
    return made, events


def _shown(output: Output) -> list[tuple[str, str]]:
    """Types and texts of the items."""
    return [
        (item["type"], item["content"][0]["text"] if "content" in item else item["arguments"])
        for item in output.items
    ]


def test_arguments_in_pieces() -> None:
    output, events = _output(
        _call(0, "c1", "f", ""), _call(0, None, None, '{"a"'), _call(0, None, None, ": 1}")
    )
    assert _shown(output) == [("function_call", '{"a": 1}')]
    assert [event["delta"] for event in events if event["type"].endswith("delta")] == ['{"a"', ": 1}"]


def test_a_call_that_goes_on_after_the_next_one() -> None:
    begun = (_call(0, "c1", "f", "{"), _call(1, "c2", "f", "{}"))
    assert _shown(_output(*begun, _call(0, None, None, "}"))[0]) == [("function_call", "{}")] * 2
    with pytest.raises(EngineBroken):
        _output(_call(0, "c1", "f", "{}"), {"content": "a"}, _call(0, None, None, "{}"))


def test_a_turn_that_is_cut_in_a_call_has_no_later_item_that_is_complete() -> None:
    output = Output(Names(_BASE), Tools(), summary=False, encrypted=False)
    for part in (_call(0, "c1", "f", "{"), _call(1, "c2", "f", "{}")):
        output.add(part, "", [])
    output.end("incomplete", [])
    assert [item["status"] for item in output.items] == ["incomplete"] * 2


def test_a_text_after_a_call() -> None:
    """Nothing at all is an empty message: a client that sends it back sends a turn."""
    assert _shown(_output()[0]) == [("message", "")]
    output, _ = _output({"content": "a"}, _call(0, "c", "f", "{}"), {"content": "\n"})
    assert _shown(output) == [("message", "a"), ("function_call", "{}"), ("message", "\n")]
    ids = [f"msg_{_BASE}0000", f"fc_{_BASE}0001", f"msg_{_BASE}0002"]
    assert [item["id"] for item in output.items] == ids
