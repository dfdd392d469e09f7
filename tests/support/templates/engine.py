"""Renders conversations as vLLM does: it converts messages, then calls `apply_chat_template`.

The conversion is that of vLLM 0.32 (`parse_chat_messages` and `safe_apply_chat_template`). vLLM decides
from the syntax tree of a template whether it takes content as text or as parts. Its decisions are recorded
in `takes_parts.txt`, one digest per line; the campaign compares both with vLLM itself.
"""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.templates.corpus import digest
from tests.support.templates.shapes import Message

TAKES_PARTS_FILE = Path(__file__).with_name("takes_parts.txt")
Tools = list[dict[str, Any]]


class TemplateRefuses(Exception):
    """The template raises an error for these messages."""


@functools.cache
def takes_parts(template: str) -> bool:
    """Whether vLLM passes content to a template as a list of parts."""
    return digest(template) in recorded_digests()


@functools.cache
def recorded_digests() -> frozenset[str]:
    return frozenset(TAKES_PARTS_FILE.read_text("utf-8").split())


@dataclass(frozen=True)
class Renderer:
    """vLLM's conversion, then the `apply_chat_template` of a transformers tokenizer."""

    tokenizer: Any
    template: str

    def render(self, messages: Sequence[Message], tools: Tools | None, kwargs: Mapping[str, Any]) -> str:
        """The text of a conversation. `kwargs` holds `add_generation_prompt`.

        Raises:
            TemplateRefuses: the template raises an error.
        """
        converted = convert(messages, parts=takes_parts(self.template))
        if not _takes_developer(self.template):
            converted = fold_developer(converted)
        try:
            text: str = self.tokenizer.apply_chat_template(
                converted, tools=copy.deepcopy(tools), tokenize=False, **kwargs
            )
        except Exception as error:  # the boundary: vLLM answers 400 for every error of a template
            raise TemplateRefuses(f"{type(error).__name__}: {error}") from error
        return text


def convert(messages: Sequence[Message], *, parts: bool) -> list[Message]:
    """Messages as vLLM passes them to a template.

    Args:
        parts: pass content as a list of parts, not as text. Results of tools are always text.
    """
    return [_convert(message, parts) for message in messages]


def _convert(message: Message, parts: bool) -> Message:
    role, content = message["role"], message.get("content")
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts = [part["text"] for part in content]
    converted: Message = {"role": role, "content": "\n".join(texts)}
    if parts and role != "tool":
        converted["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if message.get("tool_calls"):
            converted["tool_calls"] = [_convert_call(call) for call in message["tool_calls"]]
        # vLLM's request model fills `reasoning` from `reasoning_content`
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            converted["reasoning"] = converted["reasoning_content"] = reasoning
    if role == "tool" and "tool_call_id" in message:
        converted["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        converted["name"] = message["name"]
    if role == "developer":
        converted["tools"] = message.get("tools")
    return converted


def _convert_call(call: Mapping[str, Any]) -> dict[str, Any]:
    converted: dict[str, Any] = copy.deepcopy(dict(call))
    try:
        arguments = json.loads(converted["function"].get("arguments") or "{}")
    except json.JSONDecodeError:
        arguments = {}
    function = {
        "arguments": arguments if isinstance(arguments, dict) else {},
        "name": converted["function"]["name"],
    }
    # in the order of vLLM's request model, which templates print that show a call as JSON
    return {"id": converted["id"], "function": function, "type": converted["type"]}


def _takes_developer(template: str) -> bool:
    return '"developer"' in template or "'developer'" in template


def fold_developer(messages: list[Message]) -> list[Message]:
    """Developer messages as system messages, and all of these merged into one at the start.

    Messages without a developer message are not changed.
    """
    if not any(message["role"] == "developer" for message in messages):
        return messages
    system: list[str] = []
    others: list[Message] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            others.append(message)
            continue
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        system += [text] if text else []
    if len(messages) - len(others) == 1 and messages[0]["role"] in ("system", "developer"):
        first = {key: value for key, value in messages[0].items() if key != "tools"}
        return [{**first, "role": "system"}, *messages[1:]]
    return [{"role": "system", "content": "\n\n".join(system)}, *others]
