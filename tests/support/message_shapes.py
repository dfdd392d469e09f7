"""Requests in every shape that the official SDK sends, with what the model answers."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_vllm import Reply
from tests.support.tiny_model import END

Fields = dict[str, Any]
_HELLO = (74, 71, 78, 78, 81, END)
_LOOK: Fields = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
_CACHED: Fields = {"cache_control": {"type": "ephemeral"}}
_USE: Fields = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "here"}}
_RESULT: Fields = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a tree"}
_THINKING: Fields = {"type": "thinking", "thinking": "Where?", "signature": "c2lnbmF0dXJl"}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"where": "up"}'}}


def _text(text: str, **more: Any) -> Fields:
    return {"type": "text", "text": text, **more}


def user(*blocks: Any) -> Fields:
    """A message of the user: a text, or blocks."""
    return {"role": "user", "content": blocks[0] if isinstance(blocks[0], str) else list(blocks)}


def assistant(*blocks: Any) -> Fields:
    """A message of the assistant."""
    return {**user(*blocks), "role": "assistant"}


@dataclass
class Shape:
    """A request and the script of its answer."""

    messages: list[Fields] = field(default_factory=lambda: [user("Hi")])
    fields: Fields = field(default_factory=dict)
    reply: Reply = field(default_factory=lambda: Reply(_HELLO))
    blocks: tuple[str, ...] = ("text",)
    stop_reason: str = "end_turn"


def _asks(*messages: Fields, **fields: Any) -> Shape:
    return Shape(list(messages) or [user("Hi")], fields)


_CALLING = Reply(_HELLO, message={"content": None, "tool_calls": [_CALL]}, finish="tool_calls")
_AGENT = [user("Look!"), assistant(_THINKING, _text("Well."), _USE), user(_RESULT)]

SHAPES: dict[str, Shape] = {
    "a text": _asks(),
    "a system prompt in blocks": _asks(
        system=[_text("x-anthropic-billing-header: cch=1;"), _text("Be"), _text(" brief.", **_CACHED)]
    ),
    "thinking that comes back": _asks(user("Hi"), assistant(_THINKING, _text("Hello.")), user("More.")),
    "a result": _asks(*_AGENT, tools=[_LOOK]),
    "a result in parts": _asks(
        *_AGENT[:2], user(_text("Here:"), {**_RESULT, "content": [_text("a"), _text("b")]}), tools=[_LOOK]
    ),
    "two results": _asks(
        user("Look!"),
        assistant(_USE, {**_USE, "id": "toolu_2"}),
        user({**_RESULT, "tool_use_id": "toolu_2"}, _RESULT),
        tools=[_LOOK],
    ),
    "a strict tool": _asks(tools=[{**_LOOK, **_CACHED, "type": "custom", "strict": True}]),
    "one call at most": _asks(tools=[_LOOK], tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    "no call": _asks(tools=[_LOOK], tool_choice={"type": "none"}),
    "a forced call": Shape(
        fields={"tools": [_LOOK], "tool_choice": {"type": "tool", "name": "look"}},
        reply=Reply(_HELLO, message={"content": None, "tool_calls": [_CALL]}, finish="stop"),
        blocks=("tool_use",),
        stop_reason="tool_use",
    ),
    "a call": Shape(fields={"tools": [_LOOK]}, reply=_CALLING, blocks=("tool_use",), stop_reason="tool_use"),
    "thinking and a call": Shape(
        fields={"tools": [_LOOK]},
        reply=Reply(
            _HELLO, message={"content": "Ah.", "reasoning": "so", "tool_calls": [_CALL]}, finish="tool_calls"
        ),
        blocks=("thinking", "text", "tool_use"),
        stop_reason="tool_use",
    ),
    "parallel calls": Shape(
        fields={"tools": [_LOOK]},
        reply=Reply(
            _HELLO,
            message={"content": None, "tool_calls": [_CALL, {**_CALL, "id": "call_2"}]},
            finish="tool_calls",
        ),
        blocks=("tool_use", "tool_use"),
        stop_reason="tool_use",
    ),
    "thinking with a budget": Shape(
        fields={"thinking": {"type": "enabled", "budget_tokens": 1024}},
        reply=Reply(_HELLO, message={"reasoning": "so, so"}),
        blocks=("thinking", "text"),
    ),
    "no thinking": _asks(thinking={"type": "disabled"}),
    "a schema": _asks(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}),
    "sampling": _asks(extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
    "a stop sequence": Shape(
        fields={"stop_sequences": ["lo"]},
        reply=Reply(_HELLO[:3], finish="stop", stop="lo"),
        stop_reason="stop_sequence",
    ),
    "an answer that is cut": Shape(reply=Reply(_HELLO[:3]), stop_reason="max_tokens"),
    "an empty answer": Shape(reply=Reply((END,), message={"content": ""})),
    "more than the context": _asks(max_tokens=16_000),
    "fields of a beta": _asks(extra_body={"context_management": {"edits": []}, "betas": ["x"]}),
    "headers of a beta": _asks(extra_headers={"anthropic-beta": "a,b"}, extra_query={"beta": "true"}),
    "a system message after an answer": _asks(
        user("Hi"), assistant("Hello."), user("More."), {"role": "system", "content": [_text("Be brief.")]}
    ),
    "a name of a model": _asks(model="adapter"),
}
"""None of them holds an image: the fake engine takes none."""
