"""Fields of a request as the fields of a chat completion; what is refused, and what is left out."""

import json
from typing import Any

import msgspec
import pytest

from tokenproxy.base.errors import BadRequest
from tokenproxy.formats.responses.request import chat_fields, read_request, unwrapped_input

_F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
_CHAT_F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": False},
}
_NAMESPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [_F, {"type": "custom"}]}
_SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}


def _chat(fields: dict[str, Any]) -> dict[str, Any]:
    request = read_request(json.dumps({"input": "Hi", **fields}).encode())
    return {name: msgspec.json.decode(value) for name, value in chat_fields(request).items()}


_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as they are": (
        {"temperature": 0.5, "stop": ["x"], "top_k": 5, "max_output_tokens": 7, "tools": None, "text": None},
        {"temperature": 0.5, "stop": ["x"], "top_k": 5, "max_tokens": 7},
    ),
    "a stream": ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    "effort": ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True},
            }
        },
    ),
    "log-probabilities": (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 3},
    ),
    "a function": (
        {"tools": [_F], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [_CHAT_F], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    "a namespace": (
        {"tools": [_NAMESPACE], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [{"type": "function", "function": {**_CHAT_F["function"], "name": "mcp__f"}}],
            "tool_choice": {"type": "function", "function": {"name": "mcp__f"}},
        },
    ),
    "tools and effort among the items": (
        {
            "reasoning": {"effort": "low"},
            "tools": [_F],
            "input": [
                {"type": "additional_tools", "role": "developer", "tools": [{**_F, "name": "g"}]},
                {"role": "user", "content": "Hi"},
                {"type": "configuration_update", "reasoning": {"effort": "high"}},
            ],
        },
        {
            "tools": [_CHAT_F, {"type": "function", "function": {**_CHAT_F["function"], "name": "g"}}],
            "reasoning_effort": "high",
        },
    ),
    "tools that others run": (
        {"tools": [{"type": kind} for kind in ("web_search_preview_2025_03_11", "tool_search")]},
        {},
    ),
    "what is ignored": (
        {
            **{"service_tier": "auto", "truncation": "auto", "metadata": {"a": "b"}, "prompt_cache_key": "k"},
            **{"client_metadata": {}, "background": False, "store": False, "max_tool_calls": 3, "n": 3},
        },
        {},
    ),
}


@pytest.mark.parametrize("fields, expected", _FIELDS.values(), ids=_FIELDS)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _chat(fields) == expected


def test_a_compaction_keeps_the_tools_and_calls_none() -> None:
    fields = {"tools": [_F], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    assert _chat({**fields, "input": items}) == {"tools": [_CHAT_F], "tool_choice": "none"}
    request = read_request(json.dumps({**fields, "input": items[:1]}).encode(), compact=True)
    assert msgspec.json.decode(chat_fields(request)["tool_choice"]) == "none"


_UNNAMED = {"type": "namespace", "name": "n", "tools": [{"type": "function"}]}
_GRAMMAR = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}
_TRIGGER = [{"type": "compaction_trigger"}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "param, fields",
    [
        ("input", {"input": []}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("max_output_tokens", {"max_output_tokens": "7"}),
        ("tools[1].type", {"tools": [_F, {"type": "computer_use_preview"}]}),
        ("tools[0].format", {"tools": [_GRAMMAR]}),
        ("tools[0].tools[0].name", {"tools": [_UNNAMED]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [_F], "tool_choice": {"type": "function", "name": "g"}}),
        ("tool_choice.type", {"tools": [_F], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("input[0].type", {"input": _TRIGGER}),
    ],
)
def test_fields_that_are_refused(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        _chat(fields)
    assert refused.value.param == param


def test_arguments_that_hold_no_input_are_shown_as_they_are() -> None:
    for arguments in ("{", "[]", '{"input": 1}'):
        assert unwrapped_input(arguments) == arguments
