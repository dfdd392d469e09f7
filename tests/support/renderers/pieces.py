"""Renderings as pieces: texts, and markers, which are special tokens."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Pieces = list[str]


class Marker(str):
    """A special token, by its text."""

    __slots__ = ()


CUT = Marker("")
"""Texts on its two sides are encoded apart."""


class Unrenderable(ValueError):
    """The renderer refuses the conversation; the text begins as the engine's does."""


Layout = Callable[[Sequence[Message], Sequence[Message], Mapping[str, Any]], Pieces]
"""From messages, declared tools and template arguments, with `add_generation_prompt` among them."""


def words(text: str) -> list[str]:
    """Markers that are written in one text."""
    return text.split()


def text_of(content: Any, between: str = "\n\n") -> str:
    """The text of a message's content, which may be parts."""
    return between.join(part["text"] for part in content) if isinstance(content, list) else content or ""


def reasoning_of(message: Message) -> str:
    """In either spelling, as on the chat route; /tokenize of DeepSeek reads `reasoning` alone."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def calls_of(message: Message) -> list[tuple[str, str, Any]]:
    """Id, name and arguments of each call."""
    functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return [(name, each["name"], _parsed(each.get("arguments") or "{}")) for name, each in functions]


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_order(results: Sequence[Message], calls: Sequence[tuple[str, str, Any]]) -> list[Message]:
    """Tool results in the order of the calls, where both are known."""
    order = {name: index for index, (name, _, _) in enumerate(calls)}
    return sorted(results, key=lambda result: order.get(result.get("tool_call_id", ""), len(order)))


def grouped(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Messages of the same role in a row."""
    group: list[Message] = []
    for message in messages:
        if group and message["role"] != group[0]["role"]:
            yield group[0]["role"], group
            group = []
        group.append(message)
    if group:
        yield group[0]["role"], group


def declared_text(tools: Sequence[Message]) -> str:
    """In place of a page of instructions."""
    schemas = "\n".join(dumped(tool["function"]) for tool in tools)
    return f"\n\n## Tools\n{schemas}\n" if tools else ""
