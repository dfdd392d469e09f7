from typing import Any

import pytest

from tokenization import InvalidMessages
from tokenization.messages import for_template


def _call(arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "message, expected",
    [
        ({"content": "a"}, {"content": "a"}),
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"content": "a\nb"},
        ),
        ({"content": ["a", {"text": "b"}]}, {"content": "a\nb"}),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
        (
            {"content": "a", "name": "n", "tool_call_id": "t"},
            {"content": "a", "name": "n", "tool_call_id": "t"},
        ),
        ({"content": "a", "audio": None, "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "reasoning": "r"}, {"content": "a", "reasoning": "r", "reasoning_content": "r"}),
        (
            {"content": "a", "reasoning_content": "r"},
            {"content": "a", "reasoning": "r", "reasoning_content": "r"},
        ),
        ({"tool_calls": [_call('{"x": 1}')]}, {"content": "", "tool_calls": [_call({"x": 1})]}),
        ({"tool_calls": [_call({"x": 1})]}, {"content": "", "tool_calls": [_call({"x": 1})]}),
        ({"tool_calls": [_call("")]}, {"content": "", "tool_calls": [_call({})]}),
        ({"tool_calls": [_call(None)]}, {"content": "", "tool_calls": [_call({})]}),
        ({"tool_calls": [_call("{not json")]}, {"content": "", "tool_calls": [_call({})]}),
    ],
)
def test_conversion(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert for_template([{"role": "assistant", **message}]) == [{"role": "assistant", **expected}]


def test_input_messages_are_not_changed() -> None:
    message = {"role": "assistant", "tool_calls": [_call('{"x": 1}')]}
    for_template([message])
    assert message == {"role": "assistant", "tool_calls": [_call('{"x": 1}')]}


@pytest.mark.parametrize(
    "message, error",
    [
        ("text", "message 1 must be an object"),
        ({"content": "a"}, "message 1 needs a role"),
        ({"role": "", "content": "a"}, "message 1 needs a role"),
        ({"role": 5}, "message 1 needs a role"),
        ({"role": "user", "content": 5}, "content of message 1"),
        ({"role": "user", "content": {"text": "a"}}, "content of message 1"),
        ({"role": "user", "content": [5]}, "message 1 holds a part of type 'int'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1 holds a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "message 1"),
        ({"role": "user", "content": [{"type": "text"}]}, "a text part in message 1 holds no text"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool calls of message 1"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "tool calls of message 1"),
        ({"role": "assistant", "tool_calls": 5}, "tool calls of message 1"),
    ],
)
def test_invalid_messages_are_rejected(message: Any, error: str) -> None:
    with pytest.raises(InvalidMessages, match=error):
        for_template([{"role": "user", "content": "a"}, message])
