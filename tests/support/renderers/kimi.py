"""What the tokenizer of Kimi K3 makes of a conversation. No package has it to compare this layout with."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.renderers.pieces import (
    Marker,
    Message,
    Pieces,
    calls_of,
    dumped,
    grouped,
    in_order,
    reasoning_of,
    text_of,
)

_END = Marker("<|end_of_msg|>")
_TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}


def kimi_k3(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode kimi_k3`: tags whose marks are special tokens, and whose names are text."""
    thinks = bool(options.get("thinking", options.get("enable_thinking", True)))
    pieces: Pieces = []
    if tools:
        pieces += _message([("role", "system"), ("type", "tool-declare")], [dumped(tools)])
    if thinks and (effort := options.get("reasoning_effort")):
        pieces += _message([("role", "system"), ("type", "thinking-effort")], [f"thinking_effort={effort}"])
    calls: list[tuple[str, str, Any]] = []
    for role, group in grouped(messages):
        ordered = in_order(group, calls) if role == "tool" else group
        for index, message in enumerate(ordered, 1):
            if role == "assistant":
                calls = calls_of(message)
                pieces += _message([("role", role)], _turn(message, calls, thinks))
                continue
            names = {call: (name, place) for place, (call, name, _) in enumerate(calls, 1)}
            tool, place = names.get(message.get("tool_call_id", ""), ("", index))
            attributes = [("tool", tool), ("index", str(place))] if role == "tool" else []
            pieces += _message([("role", role), *attributes], [text_of(message.get("content"), "\n")])
    if options.get("add_generation_prompt", True):
        pieces += [*_open("message", [("role", "assistant")]), *_open("think" if thinks else "response")]
    return pieces


def _open(tag: str, attributes: Sequence[tuple[str, str]] = ()) -> Pieces:
    shown = "".join(f' {name}="{value}"' for name, value in attributes)
    return [Marker("<|open|>"), tag + shown, Marker("<|sep|>")]


def _close(tag: str) -> Pieces:
    return [Marker("<|close|>"), tag, Marker("<|sep|>")]


def _message(attributes: Sequence[tuple[str, str]], inner: Pieces) -> Pieces:
    return [*_open("message", attributes), *inner, *_close("message"), _END]


def _turn(message: Message, calls: Sequence[tuple[str, str, Any]], thinks: bool) -> Pieces:
    pieces: Pieces = [*_open("think"), reasoning_of(message), *_close("think")] if thinks else []
    pieces += [*_open("response"), text_of(message.get("content"), "\n"), *_close("response")]
    inner: Pieces = []
    for index, (_, name, arguments) in enumerate(calls, 1):
        inner += _open("call", [("tool", name), ("index", str(index))])
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else dumped(value)
            kind = _TYPES.get(type(value), "array")
            inner += [*_open("argument", [("key", key), ("type", kind)]), shown, *_close("argument")]
        inner += _close("call")
    return [*pieces, *_open("tools"), *inner, *_close("tools")] if calls else pieces
