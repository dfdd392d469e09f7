"""The texts of new messages: markers in their place, and whether a rendering holds them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenization.errors import TemplateUnsupported
from tokenization.keys import serialized
from tokenization.messages import Message, for_template


@dataclass(frozen=True, slots=True)
class Marks:
    """Words that occur in none of the arguments, so that they are found only where they were put."""

    nonce: str

    @property
    def turn(self) -> str:
        return f"qZ{self.nonce}assistantZq"

    @property
    def content(self) -> str:
        return f"qZ{self.nonce}contentZq"

    def new(self, index: int, part: int) -> str:
        return f"qZ{self.nonce}new{index}p{part}Zq"


def unused_mark(*arguments: object) -> str:
    """A word that occurs in none of the arguments."""
    return unused_marks(*arguments).turn


def unused_marks(*arguments: object) -> Marks:
    source, nonce = serialized(arguments), ""
    while f"qZ{nonce}".encode() in source:
        nonce += "q"
    return Marks(nonce)


def with_marks(
    message: Message, index: int, marks: Marks, words: dict[str, int], blank: list[str]
) -> dict[str, Any]:
    """A new message with a marker for each text.

    Adds to `words` each marker that must be printed exactly once, with the index of its message, and to
    `blank` each that stands for white space.
    """

    def mark(part: int, text: object) -> object:
        # templates test whether a turn with calls has a content too
        if not isinstance(text, str) or (not text and message.get("tool_calls")):
            return text
        word = marks.new(index, part)
        if text.strip():
            words[word] = index
        else:
            blank.append(word)
        return word

    marked = dict(message)
    content = message.get("content") or ""
    if isinstance(content, str):
        marked["content"] = mark(0, content)
    elif isinstance(content, list):
        marked["content"] = [
            {**part, "text": mark(number, part["text"])} if "text" in part else part
            for number, part in enumerate(_parts(content))
        ]
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            with_argument(call, mark(1000 + number, "q")) for number, call in enumerate(calls)
        ]
    return marked


def with_argument(call: Mapping[str, Any], argument: object) -> dict[str, Any]:
    """A tool call with other arguments: one, of this value."""
    return {**call, "function": {**call["function"], "arguments": {"q": argument}}}


def check_new_texts(tail: str, new: Sequence[Message], strings: Sequence[str]) -> None:
    """Check that the tail holds the text of each new message, as it is or escaped.

    A template may leave out of a text only what its source looks for, such as `/no_think`.

    Raises:
        TemplateUnsupported: it does not.
    """
    for index, message in enumerate(new):
        if message.get("role") == "assistant":
            continue  # its reasoning may be left out
        for text in _texts(message.get("content")):
            if not _printed(text.strip(), tail) and not all(
                _printed(piece, tail) for piece in _without(text, strings)
            ):
                raise TemplateUnsupported(
                    f"the template does not print the text of new message {index} ({message.get('role')})"
                )


def _texts(content: object) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in _parts(content) if "text" in part]
    return [content] if isinstance(content, str) else []


def _parts(content: list[Any]) -> list[dict[str, Any]]:
    """The parts of a content in the form that templates take; those with a text have it under `text`."""
    parts: list[dict[str, Any]] = for_template([{"role": "user", "content": content}], parts=True)[0][
        "content"
    ]
    return parts


def _printed(text: str, tail: str) -> bool:
    if text in tail:
        return True
    escaped = (json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text))
    return any(form[1:-1] in tail for form in escaped)


def _without(text: str, strings: Sequence[str]) -> list[str]:
    """The pieces of a text between occurrences of strings, without white space around them."""
    removed = sorted((string for string in strings if string), key=len, reverse=True)
    pieces = re.split("|".join(map(re.escape, removed)) or r"(?!)", text)
    return [piece.strip() for piece in pieces]


def has_text(content: object) -> bool:
    """Whether a content holds more than white space."""
    return any(text.strip() for text in _texts(content))


def last_text(turn: Message) -> str:
    """The last text of a turn's content, without white space around it."""
    texts = _texts(turn.get("content"))
    return texts[-1].strip() if texts else ""
