"""What a template prints after a sampled turn, read from its renderings; nothing is declared for a template.

For a history H that ends with an assistant turn, and new messages N:

1. Put a marker at the end of the turn's text: after its content or, in a turn with tool calls, at the end of the
   last string among the arguments of its last call (at the end of the call's name, if there is none).
2. Render H and N together. The text after the marker is divided into the `tail` (the rest of the call's syntax),
   the `close` of the turn, and the `rest`.
3. Render H alone. What both renderings have in common after the marker holds the tail and the close, and nothing of
   the next message. The last added token in it that is no call syntax ends the turn.
4. If it holds no such token, then the next added token ends the turn: the model samples the token that opens the next
   message (GLM, Gemma 4); or the template prints no close after the last turn, or another one (GPT-OSS).
5. Repeat with another marker. The result must be equal.

An added token is call syntax if its partner, such as `<tool_call>` for `</tool_call>`, is in the text of the turn,
or if it is printed between two calls of one turn.

Where a step has no result, `Undecided` tells why. Nothing of the package under test is used.
"""

import copy
import itertools
import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from tests.templates.engine import Renderer, TemplateRefuses
from tests.templates.shapes import TOOLS, Message, Shape, call

MARKS = ("Qmarkonez", "Zothermarkthatislongerq")
_GENERATION = {"add_generation_prompt": True}
_NO_GENERATION = {"add_generation_prompt": False}
_USER_WORD, _NEXT_WORD = "newfirstword", "newsecondword"


class Reason(StrEnum):
    """Why a template gives no expected text for a conversation."""

    PROMPT_REFUSED = "the template raises an error before the turn is sampled"
    REFUSED = "the template raises an error for the whole conversation"
    TURN_NOT_PRINTED = "the template does not print the turn's text or its last call"
    TURN_REPEATED = "the template prints the turn's text more than once"
    NEW_NOT_PRINTED = "the template does not print all new messages after the turn"
    NEW_BEFORE_TURN = "the template prints new messages before the turn's end"
    REORDERED = "the template prints text of the turn after the new messages"
    DEPENDS_ON_TURN = "the text after the turn depends on the turn's text"
    NO_STOP = "the template prints no token that ends the turn"
    UNCLEAR_STOP = "the turn alone cannot be rendered, so its close is unclear"


class Undecided(Exception):
    """The renderings give no expected text."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class TurnEnd:
    """The text of a rendering after the marker, in three parts."""

    tail: str
    """The rest of the call's syntax; empty in a turn without calls."""
    close: str
    """What closes the turn, up to its stop token; empty where the stop token opens the next message."""
    rest: str
    """Separators, the new messages and the generation prompt."""
    stop: str
    """The stop token as this rendering has it: the end of `close` or, if that is empty, the start of `rest`."""
    sampled_stop: str
    """The token that the model samples there: another than `stop` if the last turn of a rendering ends with it."""

    @property
    def text(self) -> str:
        """All text after the turn's own."""
        return self.close + self.rest


@dataclass(frozen=True)
class _Token:
    """An added token in a text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class GenericOracle:
    """Reads the text and the ids after a turn from the renderings of one template."""

    renderer: Renderer
    tokenizer: Any
    """A transformers tokenizer, for the ids."""
    reads_generation_prompt: bool
    """Whether the template reads `add_generation_prompt`; otherwise a history alone may end with the header of
    the next turn."""
    _ends: dict[str, "TurnEnd | Undecided"] = field(default_factory=dict)

    @cached_property
    def added_tokens(self) -> re.Pattern[str]:
        """A pattern that matches each added token of the tokenizer."""
        tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Message], shape: Shape, kwargs: Mapping[str, Any]) -> str:
        """Raises TemplateRefuses."""
        return self.renderer.render(messages, TOOLS if shape.with_tools else None, {**_GENERATION, **kwargs})

    def turn_end(self, shape: Shape, kwargs: Mapping[str, Any]) -> TurnEnd:
        """What the template prints after the last turn of the history, with the new messages.

        Raises:
            Undecided: the renderings do not show it.
        """
        key = repr((shape, sorted(kwargs.items())))
        if key not in self._ends:
            try:
                self._ends[key] = self._turn_end(shape, kwargs)
            except Undecided as undecided:
                self._ends[key] = undecided
        end = self._ends[key]
        if isinstance(end, Undecided):
            raise end
        return end

    def prompt(self, shape: Shape, kwargs: Mapping[str, Any]) -> str:
        """The text of the prompt after which the turn is sampled. Raises Undecided."""
        try:
            return self.render(shape.history[:-1], shape, {**kwargs, **_GENERATION})
        except TemplateRefuses as error:
            raise Undecided(Reason.PROMPT_REFUSED, str(error)) from error

    def turn_text(self, shape: Shape, kwargs: Mapping[str, Any], history: list[Message]) -> str:
        """The text of a turn after the prompt, up to the end of its content or of its last call's arguments.

        Raises:
            Undecided: the template refuses the history, or does not print the turn.
        """
        marked_history = marked(history, MARKS[0])
        whole = self._alone(marked_history, shape, kwargs)
        if whole is None:
            try:
                whole = self.render([*marked_history, *shape.new], shape, kwargs)
            except TemplateRefuses as error:
                raise Undecided(Reason.REFUSED, str(error)) from error
        if MARKS[0] not in whole:
            raise Undecided(Reason.TURN_NOT_PRINTED, whole)
        return self._after_prompt(self.prompt(shape, kwargs), whole.partition(MARKS[0])[0])

    def _turn_end(self, shape: Shape, kwargs: Mapping[str, Any]) -> TurnEnd:
        self.prompt(shape, kwargs)
        first, second = (self._after_mark(shape, kwargs, mark) for mark in MARKS)
        if first != second:
            raise Undecided(Reason.DEPENDS_ON_TURN, f"{first} and {second}")
        return first

    def _after_mark(self, shape: Shape, kwargs: Mapping[str, Any], mark: str) -> TurnEnd:
        history = marked(shape.history, mark)
        try:
            whole = self.render([*history, *shape.new], shape, kwargs)
        except TemplateRefuses as error:
            raise Undecided(Reason.REFUSED, str(error)) from error
        before, separator, after = whole.partition(mark)
        if not separator:
            raise Undecided(Reason.TURN_NOT_PRINTED, whole)
        if marks_a_name(shape.history):
            after = after.replace(mark, "")
        if mark in after:
            raise Undecided(Reason.TURN_REPEATED, whole)
        _check_new_messages(shape, before, after)
        alone = self._alone(history, shape, kwargs)
        alone_after = alone.partition(mark)[2] if alone and mark in alone else None
        turn_text = self._after_prompt(self.prompt(shape, kwargs), before)
        header = after[: min(after.index(word) for word in words_of(shape.new))]
        return self._divide(shape, turn_text, header, after, alone_after)

    def _divide(self, shape: Shape, turn_text: str, header: str, after: str, alone: str | None) -> TurnEnd:
        """Divide the text after the marker. `header` is its start, up to the first word of a new message."""
        tokens = self._tokens(header)
        syntax = self._syntax(shape, turn_text, tokens)
        free = list(itertools.dropwhile(lambda token: token.text in syntax, tokens))
        shared = len(os.path.commonprefix([header, alone])) if alone is not None else 0
        closing = [token for token in free if token.end <= shared]
        if not self.reads_generation_prompt:
            closing = closing[:1]
        if closing and not self._opens_message(closing[-1], free[-1], after):
            start = closing[0].start if shape.kind == "call" else 0
            end = closing[-1]
            return TurnEnd(after[:start], after[start : end.end], after[end.end :], end.text, end.text)
        if not free:
            raise Undecided(Reason.NO_STOP, after)
        stop = free[0]
        start = stop.start if shape.kind == "call" else 0
        last = [token.text for token in self._tokens(alone or "") if token.text not in syntax]
        if last and last[0] != stop.text and self.reads_generation_prompt:
            return TurnEnd(after[:start], after[start : stop.end], after[stop.end :], stop.text, last[0])
        if stop.text in self._closes and not self._opens_message(stop, free[-1], after):
            return TurnEnd(after[:start], after[start : stop.end], after[stop.end :], stop.text, stop.text)
        if alone is None and stop.text != free[-1].text:
            raise Undecided(Reason.UNCLEAR_STOP, after)
        return TurnEnd(after[: stop.start], "", after[stop.start :], stop.text, stop.text)

    def _opens_message(self, stop: _Token, last: _Token, after: str) -> bool:
        """Whether the stop token is the first of a pair around the next message, as in Gemma 4.

        Args:
            last: the last added token before the first word of a new message.
        """
        pair = [token for token in self._tokens(after[stop.end :]) if _stem(token.text) == _stem(stop.text)]
        return stop == last and bool(pair) and pair[0].text != stop.text

    def _tokens(self, text: str) -> list[_Token]:
        return [_Token(*match.span(), match.group()) for match in self.added_tokens.finditer(text)]

    def _syntax(self, shape: Shape, turn_text: str, tokens: list[_Token]) -> set[str]:
        """The texts of those tokens that are call syntax."""
        if shape.kind == "content":
            return set()
        opened = {_stem(token.text) for token in self._tokens(turn_text)}
        opened -= {_stem(token) for token in self._of_messages}
        return {token.text for token in tokens if _stem(token.text) in opened} | self._between_calls

    @cached_property
    def _between_calls(self) -> frozenset[str]:
        """Added tokens that the template prints between two calls of one turn."""
        calls = [call(1, MARKS[0]), call(2, MARKS[1])]
        calls[1]["function"]["name"] = _NEXT_WORD
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        shape = Shape("", "", [{"role": "user", "content": "Hi"}, turn], [], with_tools=True)
        whole = self._alone(shape.history, shape, {}) or ""
        between = re.search(f"{MARKS[0]}(.*?){_NEXT_WORD}", whole, re.DOTALL)
        found = frozenset(token.text for token in self._tokens(between[1])) if between else frozenset()
        # each call may be a message of its own
        return frozenset() if found & self._of_messages else found

    @cached_property
    def _of_messages(self) -> frozenset[str]:
        """Added tokens in a prompt of a single user message, without tools."""
        shape = Shape("", "", [], [])
        try:
            prompt = self.render([{"role": "user", "content": "Hi"}], shape, {})
        except TemplateRefuses:
            return frozenset()
        return frozenset(token.text for token in self._tokens(prompt))

    @cached_property
    def _closes(self) -> frozenset[str]:
        """The token that follows the text of a user message."""
        shape = Shape(
            "",
            "",
            [{"role": "user", "content": _USER_WORD}, {"role": "assistant", "content": MARKS[0]}],
            [{"role": "user", "content": _NEXT_WORD}],
        )
        try:
            whole = self.render([*shape.history, *shape.new], shape, {})
        except TemplateRefuses:
            return frozenset()
        after_user = whole.partition(_USER_WORD)[2].partition(MARKS[0])[0]
        return frozenset(token.text for token in self._tokens(after_user)[:1])

    def _alone(self, history: Sequence[Message], shape: Shape, kwargs: Mapping[str, Any]) -> str | None:
        """The rendering of a history that ends with the turn; None if the template refuses it."""
        try:
            return self.render(history, shape, {**kwargs, **_NO_GENERATION})
        except TemplateRefuses:
            return None

    def _after_prompt(self, prompt: str, text: str) -> str:
        """A rendering without its common prefix with the prompt, which ends before an added token."""
        shared = len(os.path.commonprefix([prompt, text]))
        cut = next((token.start for token in self._tokens(text) if token.start < shared < token.end), shared)
        return text[cut:]


def marked(history: Sequence[Message], mark: str) -> list[Message]:
    """The history with a marker at the end of the text of its last turn."""
    *before, last = copy.deepcopy(list(history))
    if last.get("tool_calls"):
        function = last["tool_calls"][-1]["function"]
        arguments = json.loads(function["arguments"] or "{}")
        texts = [name for name, value in arguments.items() if isinstance(value, str)]
        if texts:
            arguments[texts[-1]] += mark
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        else:
            function["name"] += mark
    elif isinstance(last["content"], list):
        last["content"][-1]["text"] += mark
    else:
        last["content"] = (last["content"] or "") + mark
    return [*before, last]


def marks_a_name(history: Sequence[Message]) -> bool:
    """Whether `marked` puts the marker into the name of a call."""
    calls = history[-1].get("tool_calls") or []
    return bool(calls) and not any(
        isinstance(value, str) for value in json.loads(calls[-1]["function"]["arguments"] or "{}").values()
    )


def words_of(new: Sequence[Message]) -> list[str]:
    """The word of each new message that starts with "new", by which to find the message."""
    return [word_of(message) for message in new]


def word_of(message: Message) -> str:
    content = message["content"]
    text = " ".join(part["text"] for part in content) if isinstance(content, list) else content
    return next(word for word in text.replace('"', " ").split() if word.startswith("new")).rstrip(":,\u200b")


def content_of(message: Message) -> str:
    """A message's content as text."""
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _check_new_messages(shape: Shape, before: str, after: str) -> None:
    words = words_of(shape.new)
    if any(word in before for word in words):
        raise Undecided(Reason.NEW_BEFORE_TURN, before)
    if not all(word in after for word in words):
        raise Undecided(Reason.NEW_NOT_PRINTED, after)
    content = content_of(shape.history[-1])
    if shape.kind == "call" and content and content in after:
        raise Undecided(Reason.REORDERED, after)


def _stem(token: str) -> str:
    """Equal for the two tokens of a pair: `tool_call` for `<tool_call>`, `</tool_call>`, `<|tool_call_begin|>`."""
    words = re.findall(r"[a-z]+", token.lower().replace("\u2581", "_"))
    return "_".join(word for word in words if word not in ("begin", "start", "end", "of"))
