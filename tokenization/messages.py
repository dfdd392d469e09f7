"""Messages in the shape chat templates expect.

OpenAI clients and chat templates differ in three places: content may arrive as text parts, tool-call
arguments as JSON text, and reasoning under two names. The conversion here follows what vLLM does before it
renders, so that text appended here equals text rendered there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.errors import InvalidMessages

Message = Mapping[str, Any]
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_KEPT = ("name", "tool_call_id", "task")


def for_template(messages: Sequence[Message], *, parts: bool = False) -> list[dict[str, Any]]:
    """Messages as a template sees them: arguments as objects, both reasoning names, content as it takes it.

    Args:
        parts: whether content is a list of text parts, as vLLM gives it to templates that loop over it;
            otherwise it is one text. Tool results are one text in either case.

    Raises:
        InvalidMessages: a message is no object, has no role, or holds something that is not text.
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
    for key in _KEPT:
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
    """The texts of a message's content: none of null, one of a string, one of each part.

    Raises:
        InvalidMessages: the content is neither text, null nor a list of text parts.
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
        raise InvalidMessages(f"message {index} holds a part of type {kind!r}; only text can be appended")
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
            arguments = {}  # as vLLM does: text that is no JSON must not end a conversation
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}
