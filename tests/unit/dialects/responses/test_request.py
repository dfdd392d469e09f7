"""Fields of a request as the fields of a chat completion; what is refused, and what is left out."""

import json
from typing import Any

import msgspec
import pytest

from proxy.dialects.responses.request import chat_fields, read_request
from proxy.dialects.responses.tools import unwrapped_input, wrapped_input
from proxy.errors import BadRequest

_F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
_CHAT_F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": False},
}
_NAMESPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [_F, {"type": "custom"}]}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def _chat(fields: dict[str, Any]) -> dict[str, Any]:
    request = read_request(json.dumps({"input": "Hi", **fields}).encode())
    return {name: msgspec.json.decode(value) for name, value in chat_fields(request).items()}


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "as they are": (
        {"model": "m", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "top_k": 5, "user": "u"},
        {"model": "m", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "top_k": 5, "user": "u"},
    ),
    "nulls": ({"temperature": None, "tools": None, "reasoning": None, "text": None, "include": None}, {}),
    "a limit": ({"max_output_tokens": 7}, {"max_tokens": 7}),
    "a stream": ({"stream": True}, _STREAM),
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
    "log-probabilities of the sampled ids alone": (
        {"include": ["message.output_text.logprobs"]},
        {"logprobs": True},
    ),
    "any object": (
        {"text": {"format": {"type": "json_object"}}},
        {"response_format": {"type": "json_object"}},
    ),
    "a function": (
        {"tools": [_F], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [_CHAT_F], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    "a named function": (
        {"tools": [_F], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [_CHAT_F], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "no tools": ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    "a namespace": (
        {"tools": [_NAMESPACE], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [{"type": "function", "function": {**_CHAT_F["function"], "name": "mcp__f"}}],
            "tool_choice": {"type": "function", "function": {"name": "mcp__f"}},
        },
    ),
    "tools that others run": (
        {
            "tools": [
                {"type": kind} for kind in ("web_search", "web_search_preview_2025_03_11", "tool_search")
            ]
        },
        {},
    ),
    "what is ignored": (
        {
            "service_tier": "auto",
            "truncation": "auto",
            "metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "client_metadata": {},
            "background": False,
            "store": False,
            "max_tool_calls": 3,
            "safety_identifier": "s",
            "stream_options": {"include_obfuscation": False},
            "n": 3,
        },
        {},
    ),
}


@pytest.mark.parametrize("fields, expected", FIELDS.values(), ids=FIELDS)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _chat(fields) == expected


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    [tool] = _chat({"tools": [{"type": "custom", "name": "sh", "description": "d"}]})["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("sh", "d")
    assert tool["function"]["parameters"]["required"] == ["input"]


def test_a_compaction_keeps_the_tools_and_calls_none() -> None:
    fields = {"tools": [_F], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    assert _chat({**fields, "input": items}) == {"tools": [_CHAT_F], "tool_choice": "none"}
    request = read_request(json.dumps({**fields, "input": items[:1]}).encode(), compact=True)
    assert msgspec.json.decode(chat_fields(request)["tool_choice"]) == "none"


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "input": ({"input": 1}, "input"),
    "background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "the limit": ({"max_output_tokens": "7"}, "max_output_tokens"),
    "instructions": ({"instructions": ["a"]}, "instructions"),
    "store": ({"store": 1}, "store"),
    "the previous response": ({"previous_response_id": 1}, "previous_response_id"),
    "reasoning": ({"reasoning": "low"}, "reasoning"),
    "tools": ({"tools": {}}, "tools"),
    "a tool's type": ({"tools": [_F, {"type": "computer_use_preview"}]}, "tools[1].type"),
    "a tool's name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a grammar": (
        {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}]},
        "tools[0].format",
    ),
    "a namespace without tools": ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    "a function of a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
    ),
    "a choice": ({"tools": [_F], "tool_choice": "any"}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "another tool": ({"tools": [_F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    "a kind of choice": (
        {"tools": [_F], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.type",
    ),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "a format without a schema": (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
    ),
    "a trigger that is not the last item": (
        {"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "Hi"}]},
        "input[0].type",
    ),
}


@pytest.mark.parametrize("fields, param", _REFUSED.values(), ids=_REFUSED)
def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        _chat(fields)
    assert refused.value.param == param
    assert f"`{param}" in refused.value.message or "`" in refused.value.message


@pytest.mark.parametrize("text", ["", "a", 'é "quoted"\n', '{"input": "x"}'])
def test_inputs_of_custom_tools_come_back(text: str) -> None:
    assert unwrapped_input(wrapped_input(text)) == text


@pytest.mark.parametrize("arguments", ["", "{", "[]", '{"input": 1}', '{"other": "x"}'])
def test_arguments_that_hold_no_input_are_shown_as_they_are(arguments: str) -> None:
    assert unwrapped_input(arguments) == arguments
