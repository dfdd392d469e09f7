"""The other fields of a request become the chat fields that vLLM's own route makes of them."""

import json
from typing import Any

import msgspec
import pytest

from tokenproxy.base.errors import BadRequest
from tokenproxy.formats.messages.format import chat_options
from tokenproxy.formats.messages.request import read_turn

_HI = [{"role": "user", "content": "Hi"}]
_SCHEMA = {"properties": {"b": {"type": "string"}, "a": {}}, "type": "object"}
_LOOK = {"name": "look", "input_schema": _SCHEMA}
_MORE = {"description": "d", "strict": True, "defer_loading": False}
_STRICT = {**_LOOK, **_MORE, "type": "custom", "cache_control": {"type": "ephemeral"}}
_CHAT_STRICT = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA, **_MORE}}
_OFF = {"thinking": {"type": "disabled"}}


def _options(effort: str = "none", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 4000, "messages": _HI, **fields}
    options = chat_options(read_turn(json.dumps(body).encode()), effort)
    made: dict[str, Any] = json.loads(msgspec.json.encode(options))
    assert (made.pop("model"), made.pop("max_tokens")) == ("m", 4000)
    return made


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"stop_sequences": ["a", "b"], "top_k": 3}, {"stop": ["a", "b"], "top_k": 3}),
        (
            {"stream": True},
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"thinking_token_budget": 2000}),
        ({**_OFF, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema",
                                                                        "schema": _SCHEMA}}},
        ),
        ({"cache_salt": "s", "vllm_xargs": {"b": 1}}, {"cache_salt": "s", "vllm_xargs": {"b": 1}}),
        (
            {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []},
             "container": None, "mcp_servers": [], "betas": ["x"], "speed": "fast"},
            {},
        ),
        ({"tools": [_STRICT]}, {"tools": [_CHAT_STRICT], "tool_choice": "auto"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required", "parallel_tool_calls": True}),
    ],
)  # fmt: skip
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _options(**fields) == expected


def test_disabled_thinking_is_an_effort_that_the_template_knows() -> None:
    assert _options("low", **_OFF) == {"reasoning_effort": "low"}


def test_tools_that_are_added_and_removed_on_the_way() -> None:
    new = {"type": "tool_definition", "definition": {"name": "new", "input_schema": _SCHEMA}}

    def names(*changes: tuple[str, dict[str, Any]]) -> list[Any]:
        messages = [{"role": "system", "content": [{"type": kind, "tool": tool}]} for kind, tool in changes]
        tools = _options(tools=[{**_LOOK, "defer_loading": True}], messages=[*_HI, *messages]).get(
            "tools", []
        )
        return [(tool["function"]["name"], tool["function"].get("defer_loading")) for tool in tools]

    added, removed = ("tool_addition", _REFERENCE), ("tool_removal", _REFERENCE)
    assert names() == [("look", True)]
    assert names(added, removed) == []
    assert names(removed, added) == [("look", None)]
    assert names(("tool_addition", new)) == [("look", True), ("new", None)]
    with pytest.raises(BadRequest, match="'gone' is not in `tools`"):
        names(("tool_removal", {"type": "tool_reference", "name": "gone"}))


def _saying(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


_REFERENCE = {"type": "tool_reference", "name": "look"}
_BLOCK = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "document", "source": {}}]}
_WRONG: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("model", {"model": 5}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages[1].content[1].type", {"messages": [*_HI, _BLOCK]}),
    ("messages[0].content[0].id", _saying("assistant", {"type": "tool_use"})),
    ("messages[0].content[0].type", _saying("user", {"type": "tool_removal", "tool": _REFERENCE})),
    ("chat_template_kwargs", {"chat_template_kwargs": True}),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 4000}}),
    ("output_config.effort", {"output_config": {"effort": "much"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
    ("stop_sequences[1]", {"stop_sequences": ["a", 1]}),
    ("tool_choice.type", {"tool_choice": {"type": "all"}}),
    ("tools[1].input_schema", {"tools": [_LOOK, {"name": "f", "input_schema": 5}]}),
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
]  # fmt: skip


@pytest.mark.parametrize("param, fields", _WRONG)
def test_a_wrong_field_is_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        _options(**fields)
    assert refused.value.param == param
    assert param in refused.value.message
