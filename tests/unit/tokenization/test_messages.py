from typing import Any

import pytest

from chat_tokenizer import InvalidMessages
from chat_tokenizer.messages import for_template, tools_for_template

_CACHED = {"type": "text", "text": "b", "cache_control": 1}
_REFERENCE = {"type": "tool_reference", "name": "f"}
_BILLING = "x-anthropic-billing-header: cch=1"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call(arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "message, expected",
    [
        ({"content": None}, {"content": ""}),
        ({"content": [{"type": "refusal", "refusal": "a"}, _CACHED]}, {"content": "a\nb"}),
        ({"content": "a", "name": "n", "tool_calls": []}, {"content": "a", "name": "n"}),
        ({"reasoning_content": "r"}, {"content": "", "reasoning": "r", "reasoning_content": "r"}),
        ({"tool_calls": [_call('{"x": 1}')]}, {"content": "", "tool_calls": [_call({"x": 1})]}),
        ({"tool_calls": [_call("{not json")]}, {"content": "", "tool_calls": [_call({})]}),
    ],
)
def test_conversion(message: dict[str, Any], expected: dict[str, Any]) -> None:
    message = {"role": "assistant", **message}
    before = repr(message)
    assert for_template([message]) == [{"role": "assistant", **expected}]
    assert repr(message) == before


@pytest.mark.parametrize(
    "message, text, parts",
    [
        ({"role": "user", "content": None}, "", []),
        ({"role": "user", "content": ["a", "", _CACHED]}, "a\nb", [_text("a"), _text(""), _CACHED]),
        ({"role": "tool", "content": ["a", "", "b"]}, "a\nb", "a\n\nb"),
        ({"role": "tool", "content": ["a", _REFERENCE]}, "a\nf", [_text("a"), _REFERENCE]),
        ({"role": "system", "content": [_BILLING, "Be brief."]}, "Be brief.", [_text("Be brief.")]),
    ],
)
def test_content_formats(message: dict[str, Any], text: str, parts: list[dict[str, Any]] | str) -> None:
    for as_parts, expected in ((False, text), (True, parts)):
        [converted] = for_template([message], parts=as_parts)
        assert converted == {"role": message["role"], "content": expected}


@pytest.mark.parametrize(
    "message, expected",
    [
        ({"role": "user", "reasoning": "r", "tool_call_id": "a", "tool_calls": [5], "tools": []}, {}),
        ({"role": "tool", "tool_call_id": "a", "reasoning": "r"}, {"tool_call_id": "a"}),
        ({"role": "system", "name": "n", "task": "t"}, {"name": "n", "task": "t"}),
        ({"role": "developer", "tools": [{"name": "f"}]}, {"tools": [{"name": "f"}]}),
    ],
)
def test_each_role_has_its_own_fields(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert for_template([message]) == [{"role": message["role"], "content": "", **expected}]


def test_fields_of_calls_and_tools_have_the_order_of_vllm() -> None:
    call = {"type": "function", "x": 1, "id": "1", "function": {"name": "f", "y": 2, "arguments": "{}"}}
    [message] = for_template([{"role": "assistant", "tool_calls": [call]}])
    assert repr(message["tool_calls"][0]) == repr(
        {"id": "1", "function": {"arguments": {}, "name": "f", "y": 2}, "type": "function", "x": 1}
    )
    tool = {"type": "function", "x": 1, "function": {"parameters": {}, "name": "f"}}
    [message] = for_template([{"role": "developer", "tools": [tool]}])
    assert repr(message["tools"][0]) == repr(
        {"function": {"name": "f", "parameters": {}}, "type": "function", "x": 1}
    )


_BRIEF = {"role": "system", "content": "Be brief."}
_KIND = {"role": "developer", "content": ["Be", "kind."], "name": "n"}
_USER = {"role": "user", "content": "Hi"}
_TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "messages, expected",
    [
        ([_BRIEF, _KIND, _USER], "Be brief.\n\nBe\nkind."),
        ([_KIND, _USER, {"role": "developer", "content": ""}, _BRIEF], "Be\nkind.\n\nBe brief."),
    ],
)
def test_system_messages_are_merged_for_templates_without_developer(
    messages: list[dict[str, Any]], expected: str, parts: bool
) -> None:
    user = for_template([_USER], parts=parts)
    converted = for_template(messages, parts=parts, developer=False)
    assert converted == [{"role": "system", "content": expected}, *user]
    kept = for_template(messages, parts=parts)
    assert [message["role"] for message in kept] == [message["role"] for message in messages]


def test_text_that_is_null_is_no_part() -> None:
    null: list[dict[str, Any]] = [{"type": "text", "text": None}, {"type": "text"}, {"type": "refusal"}]
    for role in ("system", "user", "assistant", "tool"):
        for parts, expected in ((False, "a"), (True, "a" if role == "tool" else [_TEXT])):
            message = {"role": role, "content": [*null, _TEXT, *null]}
            assert for_template([message], parts=parts)[0]["content"] == expected


@pytest.mark.parametrize(
    "message, error",
    [
        ({"role": 5}, "message 1 needs a role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1 holds a part of type 'image_url'"),
        ({"role": "assistant", "tool_calls": 5}, "tool calls of message 1"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, "of type 'function'"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}]}, "holds no text"),
        ({"role": "user", "content": [{"text": "a"}]}, "message 1 holds a part of type None"),
        ({"role": "tool", "content": [{"type": "tool_reference", "name": 5}]}, "holds no name"),
    ],
)
def test_invalid_messages_are_rejected(message: Any, error: str) -> None:
    with pytest.raises(InvalidMessages, match=error):
        for_template([{"role": "user", "content": "a"}, message])


def test_tools_have_the_fields_and_the_order_of_vllm() -> None:
    """Templates print tools as JSON, where the order of fields counts."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    odd: Any = {"function": {"parameters": schema, "x": 1, "name": "f"}, "y": 1, "type": "function"}
    strict: Any = {"function": {"strict": False, "defer_loading": None, "description": "d", "name": "f"}}
    expected = [
        {"name": "f", "description": None, "parameters": schema},
        {"name": "f", "description": "d", "parameters": None, "strict": False},
    ]
    converted = [{"type": "function", "function": function} for function in expected]
    assert repr(tools_for_template([odd, strict])) == repr(converted)
    assert tools_for_template([]) is None
