"""Replaces the texts of new messages by markers, and checks that a rendering holds the texts."""

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chat_tokenizer.cache import serialized
from chat_tokenizer.errors import TemplateUnsupported
from chat_tokenizer.messages import Message, arguments_of, for_template
from chat_tokenizer.renderer import Append


@dataclass(frozen=True, slots=True)
class Marks:
    """Words that occur in none of the arguments, to find where they are inserted."""

    turn: str
    content: str
    new: str
    """The start of the words for new texts; each continues with a number, `p`, a number and `Zq`."""


def unused_marks(append: Append) -> Marks:
    """Create words that occur in no message and option, and are random, so that no client can predict them.

    They are mostly the same ones, so that conversations that differ in nothing else are equal.
    """
    source, nonce = serialized((append.context, append.new, append.options.key())), _NONCE
    while nonce.encode() in source:
        nonce = _new_nonce()
    return Marks(f"qZ{nonce}assistantZq", f"qZ{nonce}contentZq", f"qZ{nonce}new")


def _new_nonce() -> str:
    return f"{random.getrandbits(40):010x}"


_NONCE = _new_nonce()


def with_marks(message: Message, index: int, marks: Marks, words: dict[str, int]) -> dict[str, Any]:
    """A new message with a marker for each text.

    Adds to `words` each marker that must be printed exactly once, with the index of its message: all but
    those that stand for white space.
    """

    def mark(part: int, text: object) -> object:
        # templates test whether a turn with calls has a content too
        if not isinstance(text, str) or (not text and message.get("tool_calls")):
            return text
        word = f"{marks.new}{index}p{part}Zq"
        if text.strip():
            words[word] = index
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
    if message.get("role") == "assistant" and (calls := message.get("tool_calls")):
        marked["tool_calls"] = [
            with_argument(call, mark(1000 + number, "q")) for number, call in enumerate(calls)
        ]
    return marked


def with_argument(call: Mapping[str, Any], argument: object) -> dict[str, Any]:
    """A tool call with other arguments: one, of this value."""
    return {**call, "function": {**call["function"], "arguments": {"q": argument}}}


def check_new_texts(tail: str, new: Sequence[Message], strings: Sequence[str]) -> None:
    """Check that the text after a lead holds the text of each new message, as it is or escaped.

    Equal texts must be printed as often as they are given.

    A template may omit only those parts of a text that its source searches for, such as `/no_think`.

    Raises:
        TemplateUnsupported: it does not.
    """
    times: Counter[str] = Counter()
    position = 0
    for index, message in enumerate(new):
        if message.get("role") == "assistant":
            continue  # its reasoning may be left out
        for text in texts_of(message.get("content")):
            written = text.strip()
            times[written] += 1
            # mostly they are printed in order, and one pass finds thousands of them
            at = tail.find(written, position)
            if at >= 0:
                position = at + len(written)
            elif not _printed(written, tail, times[written]) and not all(
                _printed(piece, tail, times[piece] or 1) for piece in _without(text, strings)
            ):
                raise TemplateUnsupported(
                    f"the template does not print the text of new message {index} ({message.get('role')})"
                )


def texts_of(content: object) -> list[str]:
    """The texts in a content."""
    if isinstance(content, list):
        return [part["text"] for part in _parts(content) if "text" in part]
    return [content] if isinstance(content, str) else []


def _parts(content: list[Any]) -> list[dict[str, Any]]:
    """The parts of a content in the form for templates; parts with a text have it under `text`."""
    parts: list[dict[str, Any]] = for_template([{"role": "user", "content": content}], parts=True)[0][
        "content"
    ]
    return parts


def _printed(text: str, tail: str, times: int) -> bool:
    if not text or tail.count(text) >= times:
        return True
    return any(tail.count(form) >= times for form in escaped(text))


def escaped(text: str) -> tuple[str, ...]:
    """A text as templates print it in JSON or as Python does."""
    return tuple(form[1:-1] for form in (json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text)))


def _without(text: str, strings: Sequence[str]) -> list[str]:
    """The pieces of a text between occurrences of strings, without white space around them."""
    removed = sorted((string for string in strings if string), key=len, reverse=True)
    pieces = re.split("|".join(map(re.escape, removed)) or r"(?!)", text)
    return [piece.strip() for piece in pieces]


def has_text(content: object) -> bool:
    """Whether a content holds more than white space."""
    return any(text.strip() for text in texts_of(content))


def last_text(turn: Message) -> str:
    """The last text that the model wrote in a turn; empty if there is none.

    It is an argument of the last tool call, or the content.
    """
    calls = turn.get("tool_calls")
    texts = _leaves(arguments_of(calls[-1]["function"])) if calls else texts_of(turn.get("content"))
    return texts[-1] if texts else ""


def with_last_text(value: Any, mark: str) -> Any | None:
    """An argument, or all of a call's, with a mark at the end of its last text; None if it holds no text."""
    if isinstance(value, str):
        return value + mark
    for key, each in reversed(_items(value)):
        if (marked := with_last_text(each, mark)) is not None:
            changed = value.copy()
            changed[key] = marked
            return changed
    return None


def _leaves(value: Any) -> list[str]:
    """The texts in an argument, in order."""
    if isinstance(value, str):
        return [value]
    return [text for _, each in _items(value) for text in _leaves(each)]


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []
