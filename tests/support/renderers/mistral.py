"""What mistral-common makes of a conversation, for the versions of its tokenizers."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.renderers.pieces import (
    Layout,
    Marker,
    Message,
    Pieces,
    Unrenderable,
    calls_of,
    dumped,
    grouped,
    in_order,
    reasoning_of,
    text_of,
)

_NO_THINKING = "Think not implemented for tokenizer < V13."
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_AFTER = {
    "system": {"user", "assistant", "system"},
    "user": {"assistant", "system", "user"},
    "assistant": {"assistant", "user", "tool"},
    "tool": {"assistant", "tool", "user"},
}


def mistral(version: int) -> Layout:
    """`--tokenizer-mode mistral`, for the versions 3, 7, 11 and 13 of its tokenizers."""

    def render(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        messages = [{**each, "role": _as_system(each["role"])} for each in messages]
        continues = bool(options.get("continue_final_message"))
        _check_mistral(messages, version, continues)
        pieces: Pieces = [Marker("<s>")]
        users = [index for index, each in enumerate(messages) if each["role"] == "user"]
        system = "\n\n".join(text_of(each["content"]) for each in messages if each["role"] == "system")
        declared = users[:1] if version >= 13 else users[-1:]
        calls: list[tuple[str, str, Any]] = []
        place = 0
        for role, group in grouped(messages):
            if role == "user":
                if tools and place <= declared[0] < place + len(group):
                    pieces += [Marker("[AVAILABLE_TOOLS]"), dumped([_tool(each) for each in tools])]
                    pieces.append(Marker("[/AVAILABLE_TOOLS]"))
                last = place <= users[-1] < place + len(group)
                texts = [system] if system and last and version < 7 else []
                texts += [text for each in group if (text := text_of(each["content"]))]
                pieces += [Marker("[INST]"), "\n\n".join(texts), Marker("[/INST]")]
            elif role == "system" and version >= 7:
                for each in group:
                    pieces += [
                        Marker("[SYSTEM_PROMPT]"),
                        text_of(each["content"]),
                        Marker("[/SYSTEM_PROMPT]"),
                    ]
            elif role == "assistant":
                calls = [call for each in group for call in calls_of(each)]
                pieces += [*_mistral_turn(group, calls, version), Marker("</s>")]
            elif role == "tool":
                if version >= 11 and not {each["tool_call_id"] for each in group} <= {
                    call[0] for call in calls
                }:
                    raise Unrenderable("Unexpected tool call id")
                for result in in_order(group, calls) if version >= 11 else group:
                    pieces += _mistral_result(result, version)
            place += len(group)
        return pieces[:-1] if continues else pieces

    return render


def _as_system(role: str) -> str:
    return "system" if role == "developer" else role


def _check_mistral(messages: Sequence[Message], version: int, continues: bool) -> None:
    if messages[-1]["role"] == "assistant" and not continues:
        raise Unrenderable("Cannot set `add_generation_prompt` to True when the last message is from")
    for before, message in itertools.pairwise(messages):
        if message["role"] not in _AFTER[before["role"]]:
            raise Unrenderable(f"Unexpected role '{message['role']}' after role '{before['role']}'")
    for message in messages:
        ids = [name for name, _, _ in calls_of(message)]
        ids += [message["tool_call_id"]] if message["role"] == "tool" else []
        if version < 13 and reasoning_of(message):
            raise Unrenderable(
                _NO_THINKING if version >= 11 else "Unexpected content chunk types in assistant"
            )
        if version < 13 and not all(map(_CALL_ID.fullmatch, ids)):
            raise Unrenderable("Tool call id was ")
        if version >= 11 and message["role"] == "assistant" and len(set(ids)) < len(ids):
            raise Unrenderable("Duplicate tool call id")
        both = bool(text_of(message.get("content"))) == bool(message.get("tool_calls"))
        if message["role"] == "assistant" and version < 7 and both:
            raise Unrenderable("Assistant message must have either content or tool_calls, but not both.")


def _tool(tool: Message) -> Message:
    function = {name: tool["function"].get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _mistral_turn(group: Sequence[Message], calls: Sequence[tuple[str, str, Any]], version: int) -> Pieces:
    pieces: Pieces = []
    texts: list[str] = []
    for message in group:
        if thought := reasoning_of(message):
            pieces += ["\n\n".join(texts), Marker("[THINK]"), thought, Marker("[/THINK]")]
            texts = []
        texts += [text] if (text := text_of(message.get("content"))) else []
    pieces.append("\n\n".join(texts))
    if calls and version < 11:
        listed = [{"name": name, "arguments": arguments, "id": call} for call, name, arguments in calls]
        return [*pieces, Marker("[TOOL_CALLS]"), dumped(listed)]
    for call, name, arguments in calls:
        identity = [Marker("[CALL_ID]"), call] if version < 13 else []
        pieces += [Marker("[TOOL_CALLS]"), name, *identity, Marker("[ARGS]"), dumped(arguments)]
    return pieces


def _mistral_result(result: Message, version: int) -> Pieces:
    text, call = text_of(result["content"]), result["tool_call_id"]
    inner: Pieces = [text] if version >= 13 else [call, Marker("[TOOL_CONTENT]"), text]
    if version < 7:
        try:
            value = json.loads(text or "{}")
        except json.JSONDecodeError:
            value = text
        inner = [dumped({"content": value, "call_id": call})]
    return [Marker("[TOOL_RESULTS]"), *inner, Marker("[/TOOL_RESULTS]")]
