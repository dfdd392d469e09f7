"""The conversation as chat messages, converted as vLLM's own route for Anthropic's messages converts it.

    [user text, image]            user: [text, image]
    [tool_result, text]           tool: result, user: text
    [thinking, text, tool_use]    assistant: reasoning, content, tool_calls

Several texts stay several parts of one content, because engines decide how to join them. Texts of the
assistant with a call or thinking between them are one text, unlike in vLLM: a stream splits it there.

A system message inside the conversation stays where it is if the chat template takes one there. For other
templates it joins the system prompt if no assistant has answered yet, as in vLLM. After that a changed system
prompt would change the ids of all earlier turns, so its text joins the user's messages at its place.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import is_null
from tokenproxy.formats.messages.request import (
    Block,
    Content,
    Image,
    Message,
    ResultPart,
    Source,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)

ChatMessage = dict[str, Any]
_BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a block of Claude Code's system prompt that changes with every request."""


def chat_messages(
    system: str | Sequence[Text] | None, messages: Sequence[Message], *, merges_system: bool
) -> tuple[list[ChatMessage], dict[int, tuple[str, ...]]]:
    """The chat messages of a conversation, and by index the signatures of the thinking in them.

    Args:
        merges_system: whether the chat template takes system messages at the start only.

    Raises:
        BadRequest: an image in the result of a tool cannot be read.
    """
    opening = [] if isinstance(system, str) else _system_texts(system or [])
    if isinstance(system, str):  # the engine would remove a first line that is the header too
        opening.append(system.partition("\n")[2] if system.startswith(_BILLING_HEADER) else system)
    conversion = _Conversion()
    for index, message in enumerate(messages):
        if message.role != "system":
            conversion.add(message, f"messages[{index}]")
            continue
        text = _system_text(message.content)
        if not text:
            continue
        if not merges_system:
            conversion.messages.append({"role": "system", "content": text})
        elif conversion.answered:
            conversion.add_system_text(text)
        else:
            opening.append(text)
    conversion.flush()
    prompt = "".join(opening)
    first = [{"role": "system", "content": prompt}] if prompt else []
    signatures = {index + len(first): found for index, found in conversion.signatures.items()}
    return [*first, *conversion.messages], signatures


class _Conversion:
    """The chat messages so far."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.signatures: dict[int, tuple[str, ...]] = {}
        self.answered = False
        """Whether there was a message of the assistant."""
        self._held: list[str] = []
        """System texts for the next message of the user: none may come between calls and their results."""

    def add(self, message: Message, path: str) -> None:
        """Convert one message of the user or the assistant. Raises BadRequest."""
        if message.role == "assistant":
            self.flush()
            self.answered = True
            blocks = () if isinstance(message.content, str) else message.content
            signed = tuple(b.signature for b in blocks if isinstance(b, Thinking) and b.signature)
            if signed:
                self.signatures[len(self.messages)] = signed
            self.messages.append(_assistant(message.content))
            return
        content: str | list[ChatMessage] | None = (
            message.content if isinstance(message.content, str) else None
        )
        if not isinstance(message.content, str):
            for index, block in enumerate(message.content):
                if isinstance(block, ToolResult):
                    self.messages += _results(block, f"{path}.content[{index}].content")
            content = _content(_parts(message.content))
        if content is not None:
            held, self._held = self._held, []
            for text in reversed(held):
                content = _joined(text, content)
            self.messages.append({"role": "user", "content": content})

    def add_system_text(self, text: str) -> None:
        """Add a system text to the message of the user before it, or else to the one after it."""
        if not self._held and self.messages and self.messages[-1]["role"] == "user":
            last = self.messages[-1]
            self.messages[-1] = {**last, "content": _joined(last["content"], text)}
        else:
            self._held.append(text)

    def flush(self) -> None:
        """Add the system texts after which the user wrote nothing."""
        if self._held:
            self.messages.append({"role": "user", "content": "\n\n".join(self._held)})
            self._held = []


def _joined(first: str | list[ChatMessage], second: str | list[ChatMessage]) -> str | list[ChatMessage]:
    """Two contents as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[ChatMessage] = []
    for content in (first, second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _system_text(content: Content) -> str:
    if not isinstance(content, str):
        return "".join(_system_texts(block for block in content if isinstance(block, Text)))
    return "" if content.startswith(_BILLING_HEADER) else content


def _system_texts(blocks: Iterable[Text]) -> list[str]:
    texts = (block.text for block in blocks if block.text)
    return [text for text in texts if not text.startswith(_BILLING_HEADER)]


def _assistant(content: Content) -> ChatMessage:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: ChatMessage = {"role": "assistant"}
    thoughts = [
        block.thinking for block in content if isinstance(block, Thinking) and block.thinking is not None
    ]
    calls = [_call(block) for block in content if isinstance(block, ToolUse)]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    parts = _content(_rejoined(content))
    return message if parts is None else {**message, "content": parts}


def _rejoined(content: Sequence[Block]) -> list[ChatMessage]:
    """The parts of an assistant's content. A text after a call or thinking continues the text before it."""
    parts: list[ChatMessage] = []
    interrupted = False
    for block in content:
        if isinstance(block, ToolUse | Thinking):
            interrupted = True
            continue
        for part in _parts([block], results=True):
            last = parts[-1] if parts else None
            if interrupted and last is not None and part["type"] == last["type"] == "text":
                parts[-1] = {"type": "text", "text": last["text"] + part["text"]}
            else:
                parts.append(part)
            interrupted = False
    return parts


def _call(block: ToolUse) -> ChatMessage:
    # the object as the client spelled it: nothing is lost by parsing it here
    arguments = "{}" if is_null(block.input) else bytes(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _parts(content: Iterable[object], *, results: bool = False) -> list[ChatMessage]:
    """The texts and images among the blocks of a message.

    Args:
        results: whether results of tools are texts too, as they are where the assistant sends them.
    """
    parts: list[ChatMessage] = []
    for block in content:
        if isinstance(block, Text) and block.text:
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, Image) and block.source is not None:
            parts.append({"type": "image_url", "image_url": {"url": block.source.location}})
        elif results and isinstance(block, ToolResult):
            text = block.content if isinstance(block.content, str) else _result_text(block.content or [])
            parts.append({"type": "text", "text": f"Tool result: {text}"})
    return parts


def _content(parts: list[ChatMessage]) -> str | list[ChatMessage] | None:
    """Parts as a content; None if there are none."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts or None


def _results(block: ToolResult, path: str) -> list[ChatMessage]:
    """The messages for the result of a tool: its text, then its images, then the tools that it found."""
    tool = {"role": "tool", "tool_call_id": block.tool_use_id}
    if not isinstance(block.content, list):
        return [{**tool, "content": block.content or ""}]
    messages: list[ChatMessage] = [{**tool, "content": _result_text(block.content)}]
    images, found = [], []
    for index, part in enumerate(block.content):
        if part.type == "image":
            url = _source(part, f"{path}[{index}].source").location
            images.append({"type": "image_url", "image_url": {"url": url}})
        elif part.type == "tool_reference" and (name := _string(part.tool_name) or _string(part.name)):
            found.append({"type": "tool_reference", "name": name})
    if images:
        messages.append({"role": "user", "content": images})
    if found:
        messages.append({**tool, "content": found})
    return messages


def _result_text(parts: Iterable[ResultPart]) -> str:
    return "\n".join(_string(part.text) for part in parts if part.type == "text")


def _string(value: msgspec.Raw) -> str:
    """A JSON string; empty for any other value."""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return ""


def _source(part: ResultPart, path: str) -> Source:
    try:
        return msgspec.json.decode(part.source, type=Source)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path}: must be the source of an image", param=path) from error
