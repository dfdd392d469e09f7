"""The judge: what a template puts behind an assistant turn, read off its own rendering of everything.

Nothing of the package under test is used. For a history H that ends in an assistant turn, and new messages N:

1. A mark, a word that occurs nowhere else, is put at the end of the turn's text: behind its content or, in a
   turn that calls tools, behind the last argument of its last call.
2. The template renders H and N together, as it would if nothing had been sampled yet.
3. Behind the mark stand, in this order: what is left of the turn (`tail`: closing quotes and tags of the
   call), the turn's `close`, and the `rest`: separators, the new messages, the generation prompt. What the
   close is, is declared with the model (`Close`); where it is, is its first occurrence behind the mark.
4. A second mark must lead to the same tail, close and rest: else what follows a turn depends on what it says.

The next prompt is then right if it continues the given ids with close and rest, less what of the close was
sampled. Ids are compared, not only text: the close begins with a token of its own, so the ids of what follows
do not depend on what stands before it, and a right answer has one spelling.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import jinja2

from tests.templates.families import Close, Template
from tests.templates.shapes import TOOLS, Message, Shape

_MARKS = ("Qmarkonez", "Zothermarkthatislongerq")


class Reason(StrEnum):
    """Why a template cannot be asked about a conversation."""

    REFUSED = "the template raises an error"
    TURN_NOT_PRINTED = "the template does not print the turn's text or its last call"
    NEW_NOT_PRINTED = "the template does not print all new messages"
    REORDERED = "the template prints text of the turn behind the new messages"


class Impossible(Exception):
    """The template's own rendering gives no answer."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class Behind:
    """What a rendering holds behind the mark."""

    tail: str
    """The end of the turn's own text."""
    close: str
    """What closes the turn; empty where `rest` begins with a stop token that opens the next message."""
    rest: str
    opener: str
    """That stop token; empty where `close` is not."""

    @property
    def text(self) -> str:
        """Everything behind the turn's own text."""
        return self.close + self.rest


@dataclass(frozen=True)
class Oracle:
    """Renders with one template, and knows nothing but its text and how its model's turns end."""

    template: Template
    tokenizer: Any
    """The plain transformers tokenizer that carries the template."""

    @cached_property
    def added_tokens(self) -> re.Pattern[str]:
        """Matches every token that the tokenizer keeps whole."""
        tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with nothing added around it."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Message], shape: Shape, kwargs: Mapping[str, Any]) -> str:
        """The template's text for messages, in the form in which an engine hands them to it.

        Raises:
            Impossible: the template refuses them.
        """
        with_prompt = {"add_generation_prompt": True, **kwargs}
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._as_seen(message) for message in messages],
                tools=copy.deepcopy(TOOLS) if shape.with_tools else None,
                tokenize=False,
                **with_prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Impossible(Reason.REFUSED, str(error)) from error
        return text

    def behind(self, shape: Shape, kwargs: Mapping[str, Any]) -> Behind:
        """What the template prints behind the sampled turn of a conversation.

        Raises:
            Impossible: its rendering does not tell.
        """
        found = [self._behind_mark(shape, kwargs, mark) for mark in _MARKS]
        if found[0] != found[1]:
            raise AssertionError(f"what follows the turn depends on the turn: {found}")
        return found[0]

    def appended(self, behind: Behind, taken: str) -> list[int]:
        """The ids that must follow a sampled turn: those of what stands behind it, less what was sampled.

        Args:
            taken: the beginning of `behind.text` that was sampled: close, part of it, opener, nothing.
        """
        whole, head = self.encode(behind.text), self.encode(taken)
        if not behind.text.startswith(taken) or whole[: len(head)] != head:
            raise AssertionError(f"{taken!r} is not how {behind.text!r} begins")
        return whole[len(head) :]

    def close_of(self, shape: Shape, kwargs: Mapping[str, Any]) -> Close:
        """How the sampled turn of a conversation ends."""
        return self.template.family.close_of(shape.kind, kwargs)

    def _behind_mark(self, shape: Shape, kwargs: Mapping[str, Any], mark: str) -> Behind:
        whole = self.render([*marked(shape.history, mark), *shape.new], shape, kwargs)
        if mark not in whole:
            raise Impossible(Reason.TURN_NOT_PRINTED, whole)
        before, _, after = whole.rpartition(mark)
        if mark in before:
            raise AssertionError(f"the template prints the turn twice: {whole!r}")
        _check_new_messages(shape, before, after)
        close = self.close_of(shape, kwargs)
        opener = "" if close.shown else close.openers[shape.new[0]["role"]]
        tail, found, rest = after.partition(close.shown or opener)
        if not found or (shape.kind == "content" and tail.strip()):
            raise AssertionError(f"the turn does not end as declared: {after!r}")
        return Behind(tail, close.shown, opener + rest if opener else rest, opener)

    def _as_seen(self, message: Message) -> Message:
        """A message as vLLM hands it to the template.

        Content is text, its parts joined by line feeds, or a list of parts, whichever the template takes;
        tool results are always text. Arguments are an object. Reasoning has both its names.
        """
        seen = copy.deepcopy(message)
        texts = _texts(message.get("content"))
        if self.template.takes_parts and message["role"] != "tool":
            seen["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            seen["content"] = "\n".join(texts)
        if "reasoning_content" in seen:
            seen["reasoning"] = seen["reasoning_content"]
        for call in seen.get("tool_calls", ()):
            if not self.template.takes_argument_text:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return seen


def marked(history: Sequence[Message], mark: str) -> list[Message]:
    """The history with a mark at the end of its last turn's text."""
    *before, last = copy.deepcopy(list(history))
    if last.get("tool_calls"):
        function = last["tool_calls"][-1]["function"]
        arguments = json.loads(function["arguments"])
        arguments[list(arguments)[-1]] += mark
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(last["content"], list):
        last["content"][-1]["text"] += mark
    else:
        last["content"] += mark
    return [*before, last]


def _texts(content: object) -> list[str]:
    return [part["text"] for part in content] if isinstance(content, list) else [str(content)]


def _check_new_messages(shape: Shape, before: str, after: str) -> None:
    words = [_word_of(message) for message in shape.new]
    if any(word in before for word in words):
        raise AssertionError("new messages stand before the turn")
    if not all(word in after for word in words):
        raise Impossible(Reason.NEW_NOT_PRINTED, after)
    said = shape.history[-1]["content"]
    if shape.kind == "call" and said and after.rfind(said) > after.find(words[0]):
        raise Impossible(Reason.REORDERED, after)


def _word_of(message: Message) -> str:
    """The word that begins with "new" in a new message."""
    text = " ".join(_texts(message["content"]))
    return next(word for word in text.replace('"', " ").split() if word.startswith("new")).rstrip(":,\u200b")
