"""The oracle: the expected text after an assistant turn, read from a rendering of the whole conversation.

Uses nothing of the package under test. For a history H that ends with an assistant turn, and new messages N:

1. Put a marker, a word that occurs nowhere else, at the end of the turn's text: after its content or, in a
   turn with tool calls, after the last argument of its last call.
2. Render H and N together.
3. Split the text after the marker into three: the `tail` of the turn's own text (closing quotes and tags of
   the call), the `close` of the turn, and the `rest` (separators, new messages, generation prompt). The close
   is declared with the model (`Close`); it is at its first occurrence after the marker.
4. Repeat with another marker. The result must be equal: otherwise the text after a turn depends on the turn.

The next prompt is right if close and rest, without the sampled part of the close, follow the given ids. Ids
are compared, not only text: the close starts with an added token, so the ids from there on do not depend on
the text before, and only one list of ids is right.
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
    """Why a template gives no expected text for a conversation."""

    REFUSED = "the template raises an error"
    TURN_NOT_PRINTED = "the template does not print the turn's text or its last call"
    NEW_NOT_PRINTED = "the template does not print all new messages"
    REORDERED = "the template prints text of the turn after the new messages"


class Impossible(Exception):
    """The template's own rendering gives no expected text."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class TextAfterTurn:
    """The text of a rendering after the marker, in three parts."""

    tail: str
    """The end of the turn's own text."""
    close: str
    """What closes the turn; empty where `rest` begins with a stop token that opens the next message."""
    rest: str
    """Separators, the new messages and the generation prompt."""
    opener: str
    """The stop token with which `rest` begins; empty if `close` is not."""

    @property
    def text(self) -> str:
        """The text after the turn's own text: close and rest."""
        return self.close + self.rest


@dataclass(frozen=True)
class Oracle:
    """Computes the expected ids after a turn, from renderings of one template and the declared `Close`."""

    template: Template
    tokenizer: Any
    """The plain transformers tokenizer that carries the template."""

    @cached_property
    def added_tokens(self) -> re.Pattern[str]:
        """A pattern that matches each added token of the tokenizer."""
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
        """Render messages, converted as an engine converts them.

        Raises:
            Impossible: the template refuses the messages.
        """
        with_prompt = {"add_generation_prompt": True, **kwargs}
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=copy.deepcopy(TOOLS) if shape.with_tools else None,
                tokenize=False,
                **with_prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise Impossible(Reason.REFUSED, str(error)) from error
        return text

    def after_turn(self, shape: Shape, kwargs: Mapping[str, Any]) -> TextAfterTurn:
        """The text that the template prints after the sampled turn of a conversation.

        Raises:
            Impossible: the rendering does not show it.
        """
        first, second = (self._after_mark(shape, kwargs, mark) for mark in _MARKS)
        if first != second:
            raise AssertionError(f"the text after the turn depends on the turn: {first} and {second}")
        return first

    def appended(self, after: TextAfterTurn, sampled_close: str) -> list[int]:
        """The ids to append to a sampled turn: those of the text after it, without the sampled part.

        Args:
            sampled_close: the start of `after.text` that was sampled: the close, a part of it, the opener, or
                nothing.
        """
        whole, head = self.encode(after.text), self.encode(sampled_close)
        if not after.text.startswith(sampled_close) or whole[: len(head)] != head:
            raise AssertionError(f"{after.text!r} does not start with {sampled_close!r}")
        return whole[len(head) :]

    def close_of(self, shape: Shape, kwargs: Mapping[str, Any]) -> Close:
        """How the sampled turn of a conversation ends."""
        return self.template.family.close_of(shape.kind, kwargs)

    def _after_mark(self, shape: Shape, kwargs: Mapping[str, Any], mark: str) -> TextAfterTurn:
        whole = self.render([*marked(shape.history, mark), *shape.new], shape, kwargs)
        if mark not in whole:
            raise Impossible(Reason.TURN_NOT_PRINTED, whole)
        before, _, after = whole.rpartition(mark)
        if mark in before:
            raise AssertionError(f"the template prints the turn twice: {whole!r}")
        _check_new_messages(shape, before, after)
        close = self.close_of(shape, kwargs)
        opener = "" if close.shown else close.openers[shape.new[0]["role"]]
        tail, separator, rest = after.partition(close.shown or opener)
        if not separator or (shape.kind == "content" and tail.strip()):
            raise AssertionError(f"the turn does not end as declared: {after!r}")
        return TextAfterTurn(tail, close.shown, opener + rest if opener else rest, opener)

    def _for_template(self, message: Message) -> Message:
        """A message as vLLM passes it to the template.

        Content becomes text, its parts joined by line feeds, or a list of parts, whichever the template
        takes; tool results are always text. Arguments become an object. Reasoning gets both of its names.
        """
        converted = copy.deepcopy(message)
        texts = _texts(message.get("content"))
        if self.template.takes_parts and message["role"] != "tool":
            converted["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            converted["content"] = "\n".join(texts)
        if "reasoning_content" in converted:
            converted["reasoning"] = converted["reasoning_content"]
        for call in converted.get("tool_calls", ()):
            if not self.template.takes_argument_text:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return converted


def marked(history: Sequence[Message], mark: str) -> list[Message]:
    """The history with a marker at the end of the text of its last turn."""
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
        raise AssertionError("the template prints new messages before the turn")
    if not all(word in after for word in words):
        raise Impossible(Reason.NEW_NOT_PRINTED, after)
    content = shape.history[-1]["content"]
    if shape.kind == "call" and content and after.rfind(content) > after.find(words[0]):
        raise Impossible(Reason.REORDERED, after)


def _word_of(message: Message) -> str:
    """The word in a new message that starts with "new": see `tests.templates.shapes`."""
    text = " ".join(_texts(message["content"]))
    return next(word for word in text.replace('"', " ").split() if word.startswith("new")).rstrip(":,\u200b")
