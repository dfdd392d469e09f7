"""Converts messages from the form that OpenAI clients send to the form that chat templates take.

The forms differ in three places: clients may send content as text parts, send the arguments of tool calls as
JSON text, and use either of two names for reasoning. The conversion is the one that vLLM makes before it
renders, so that text rendered here equals text rendered there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.errors import InvalidMessages

Message = Mapping[str, Any]
"""A chat message of the OpenAI API, as parsed from JSON."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""The values of `type` of content parts that hold text."""
_COPIED_FIELDS = ("name", "tool_call_id", "task")


def for_template(messages: Sequence[Message], *, parts: bool = False) -> list[dict[str, Any]]:
    """Convert messages: arguments to objects, reasoning to both of its names, content to text or parts.

    Args:
        parts: convert content to a list of text parts, as vLLM does for templates that loop over it;
            otherwise to one text, its parts joined by line feeds. Tool results become one text always.

    Raises:
        InvalidMessages: a message is not an object, has no role, or holds a part that is not text.
    """
    return [_convert(message, index, parts) for index, message in enumerate(messages)]


def _convert(message: Message, index: int, parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidMessages(f"message {index} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidMessages(f"message {index} needs a role")
    texts = texts_of(message.get("content"), index)
    result: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if parts and role != "tool":
        result["content"] = [{"type": "text", "text": text} for text in texts]
    for key in _COPIED_FIELDS:
        if isinstance(message.get(key), str):
            result[key] = message[key]
    reasoning = message.get("reasoning")
    reasoning = message.get("reasoning_content") if reasoning is None else reasoning
    if isinstance(reasoning, str):
        result["reasoning"] = result["reasoning_content"] = reasoning
    if role == "developer" and message.get("tools") is not None:
        result["tools"] = message["tools"]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise InvalidMessages(f"tool calls of message {index} must be a list")
        result["tool_calls"] = [_convert_call(call, index) for call in calls]
    return result


def texts_of(content: object, index: int) -> list[str]:
    """The texts in a message's content: no text for null, one for a string, one for each text part.

    Args:
        content: the message's `content`, as parsed from JSON.
        index: the message's place in the conversation, for the error message.

    Raises:
        InvalidMessages: the content is not null, a string or a list of text parts.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidMessages(f"content of message {index} must be a string or a list of parts")
    return [_text_of_part(part, index) for part in content]


def _text_of_part(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidMessages(f"message {index} holds a part of type {kind!r}: send text parts only")
    text = part.get("text", part.get(kind))
    if not isinstance(text, str):
        raise InvalidMessages(f"a text part in message {index} holds no text")
    return text


def _convert_call(call: object, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidMessages(f"tool calls of message {index} must be objects with a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            # as vLLM does: arguments that are not valid JSON must not end a conversation
            arguments = {}
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
