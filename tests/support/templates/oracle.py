"""What a template prints after a sampled turn, read from its renderings; nothing is declared for a
template.

For a history H that ends with an assistant turn, and new messages N:

1. Put a marker at the end of the turn's text: after its content or, in a turn with tool calls, at the end
   of the last string among the arguments of its last call (at the end of the call's name, if there is
   none).
2. Render H and N together. The text after the marker is divided into the `tail` (the rest of the call's
   syntax), the `close` of the turn, and the `rest`.
3. Render H alone. What both renderings have in common after the marker holds the tail and the close, and
   nothing of the next message. The last added token in it that is no call syntax ends the turn.
4. If it holds no such token, then the next added token ends the turn: the model samples the token that
   opens the next message (GLM, Gemma 4); or the template prints no close after the last turn, or another
   one (GPT-OSS).
5. Repeat with another marker. The result must be equal.

An added token is call syntax if its partner, such as `<tool_call>` for `</tool_call>`, is in the text of
the turn, or if it is printed between two calls of one turn.

Where no such token is printed, or only one that opens the turns of all roles, the model samples EOS, which is
no part of the text.

Where a step has no result, `Undecided` tells why.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tests.support.templates.marks import MARKS, content_of, marked, marks_a_name, words_of
from tests.support.templates.renderer import Renderer, TemplateRefuses, Token, stem
from tests.support.templates.shapes import Message, Shape


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
    SECOND_STOP = "the template prints the stop token twice after the turn"
    UNCLEAR_STOP = (
        "the template prints no stop token, or does not render the turn alone, so its end is unclear"
    )


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
    """What closes the turn, up to its stop token; empty where the stop token opens the next message or is not
    printed."""
    rest: str
    """Added tokens, the new messages and the generation prompt."""
    stop: str
    """The stop token in this rendering: the end of `close` or, if that is empty, the first special token of
    `rest`; empty if the template prints none."""
    sampled_stop: str
    """The token that the model samples there: the last turn of a rendering may end with another one."""
    may_open: bool = False
    """Whether `close` may open the next message instead: no other token stands between the two."""

    @property
    def text(self) -> str:
        return self.close + self.rest


@dataclass(frozen=True)
class _Rendering:
    """A rendering of history and new messages, around the marker."""

    before: str
    turn_text: str
    """The end of `before` that is not the prompt."""
    after: str
    alone: str | None
    """The text after the marker in a rendering of the history alone; None if the template refuses it."""


@dataclass(frozen=True)
class Oracle:
    """Reads the text and the ids after a turn from the renderings of one template."""

    renderer: Renderer
    _ends: dict[str, "TurnEnd | Undecided"] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, for the ids."""
        return self.renderer.tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_within(self, text: str) -> list[int]:
        """The ids of a text that follows another one: some tokenizers put a space before one that begins."""
        for before in ("a", ".", "\n"):
            first, ids = self.encode(before), self.encode(before + text)
            if ids[: len(first)] == first:
                return ids[len(first) :]
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Sequence[Message], shape: Shape, kwargs: Mapping[str, Any]) -> str:
        """Raises TemplateRefuses."""
        return self.renderer.render(messages, kwargs, shape.with_tools)

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
            return self.render(shape.history[:-1], shape, {**kwargs, "add_generation_prompt": True})
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

    def second_stop(self, rest: str) -> str:
        """The token that closes a turn or a user message at the start of a text; empty if there is none."""
        first = next(
            (token for token in self.renderer.find(rest) if token.text in self.renderer.special), None
        )
        closes = {*self.renderer.closes, self.tokenizer.eos_token} - self.renderer.openers
        return first.text if first and first.text in closes and not rest[: first.start].strip() else ""

    def _turn_end(self, shape: Shape, kwargs: Mapping[str, Any]) -> TurnEnd:
        self.prompt(shape, kwargs)
        first, second = (self._after_mark(shape, kwargs, mark) for mark in MARKS)
        if first != second:
            raise Undecided(Reason.DEPENDS_ON_TURN, f"{first} and {second}")
        if marks_a_name(shape.history):
            # a template may ask whether a tool of that name was declared
            unmarked = self.render([*shape.history, *shape.new], shape, kwargs)
            if not unmarked.endswith(first.rest):
                raise Undecided(Reason.DEPENDS_ON_TURN, unmarked)
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
        alone = self._alone(history, shape, kwargs)
        alone_after = alone.partition(mark)[2] if alone and mark in alone else None
        if marks_a_name(shape.history):
            # a name may be printed more than once
            after, alone_after = after.replace(mark, ""), alone_after and alone_after.replace(mark, "")
        if mark in after:
            raise Undecided(Reason.TURN_REPEATED, whole)
        prompt = self.prompt(shape, kwargs)
        _check_new_messages(shape, prompt, before, after)
        if shape.kind == "content":
            after, alone_after = _unquoted(after), alone_after and _unquoted(alone_after)
        turn_text = self._after_prompt(prompt, before)
        return self._divide(shape, _Rendering(before, turn_text, after, alone_after))

    def _divide(self, shape: Shape, rendering: _Rendering) -> TurnEnd:
        """Divide the text after the marker."""
        after, alone = rendering.after, rendering.alone
        header = after[: min(after.index(word) for word in words_of(shape.new))]
        tokens = self.renderer.find(header)
        syntax = self._syntax(shape, rendering.turn_text, tokens)
        free = list(itertools.dropwhile(lambda token: token.text in syntax, tokens))
        shared = _shared_length(header, alone) if alone is not None else 0
        closing = [token for token in free if token.end <= shared and token.text in self.renderer.special]
        if not self.renderer.reads_generation_prompt:
            opened = itertools.takewhile(
                lambda token: token.text not in self.renderer.assistant_header, closing
            )
            closing = list(opened) or closing[:1]
        # the history alone may go on with another message
        while closing and [closing[-1].text] == self.renderer.assistant_header[:1]:
            closing.pop()
        if self.renderer.between_messages == ("", ""):
            closing = closing[:1]
        if closing and self._opens_message(closing[-1], rendering):
            closing.pop()
        if closing:
            later = next((t for t in self.renderer.find(after) if t.start >= closing[-1].end), None)
            between = after[closing[-1].end : later.start] if later else ""
            if later and later.text == closing[-1].text and not between.strip():
                raise Undecided(Reason.SECOND_STOP, after)
            return _closed(shape, after, closing[-1], closing[-1].text)
        ends = [token for token in free if token.text in self.renderer.special]
        last = [
            token for token in self.renderer.find(alone or "") if token.text in self.renderer.special - syntax
        ]
        if (
            last
            and self.renderer.reads_generation_prompt
            and [last[0].text] != [token.text for token in ends[:1]]
        ):
            if ends and ends[0].text not in self.renderer.assistant_header:
                return _closed(shape, after, ends[0], last[0].text)
            # only the last turn of a rendering has a close
            tail = (alone or "")[: last[0].start] if shape.kind == "call" else ""
            if after.startswith(tail):
                return TurnEnd(tail, "", after[len(tail) :], "", last[0].text)
        return self._divide_at_opener(shape, rendering, ends)

    def _divide_at_opener(self, shape: Shape, rendering: _Rendering, ends: list[Token]) -> TurnEnd:
        """Divide the text after the marker, where the turn alone is printed without a close.

        Args:
            ends: special tokens after the syntax of the turn, up to the first word of a new message.
        """
        after, alone, eos = rendering.after, rendering.alone, self.tokenizer.eos_token
        stop = ends[0] if ends else None
        if stop and stop.text not in self.renderer.assistant_header:
            closes = stop.text in {*self.renderer.closes, eos} or stop.text != ends[-1].text
            if closes and not self._opens_message(stop, rendering):
                # one that is not printed after the last turn may open the next message as well; EOS does not
                may_open = len(ends) == 1 and alone is not None and stop.text != eos
                return replace(_closed(shape, after, stop, stop.text), may_open=may_open)
            if alone is None and stop.text != ends[-1].text:
                raise Undecided(Reason.UNCLEAR_STOP, after)
            start = stop.start if shape.kind == "call" else 0
            return TurnEnd(after[:start], "", after[start:], stop.text, stop.text)
        # the model samples EOS, and the template does not print it
        if shape.kind == "content":
            return TurnEnd("", "", after, "", self.tokenizer.eos_token)
        if alone is None or not after.startswith(alone) or not self.renderer.reads_generation_prompt:
            raise Undecided(Reason.UNCLEAR_STOP, after)
        return TurnEnd(alone, "", after[len(alone) :], "", self.tokenizer.eos_token)

    def _opens_message(self, stop: Token, rendering: _Rendering) -> bool:
        """Whether the stop token is the first of a pair around the next message, as in Gemma 4."""
        if stop.text.startswith("</") or "end" in stop.text:
            return False
        earlier, later = (
            [token.text for token in self.renderer.find(text) if stem(token.text) == stem(stop.text)]
            for text in (rendering.before, rendering.after[stop.end :])
        )
        return earlier[:1] in ([], [stop.text]) and bool(later) and later[0] != stop.text

    def _syntax(self, shape: Shape, turn_text: str, tokens: list[Token]) -> set[str]:
        """The texts of those tokens that are call syntax."""
        if shape.kind == "content":
            return set()
        opened = {stem(token.text) for token in self.renderer.find(turn_text)}
        opened -= {stem(token) for token in self.renderer.of_messages}
        syntax = {token.text for token in tokens if stem(token.text) in opened} | self.renderer.between_calls
        return syntax | self.renderer.after_name if marks_a_name(shape.history) else syntax

    def _alone(self, history: Sequence[Message], shape: Shape, kwargs: Mapping[str, Any]) -> str | None:
        """The rendering of a history that ends with the turn; None if the template refuses it."""
        return self.renderer.render_alone(history, kwargs, shape.with_tools)

    def _after_prompt(self, prompt: str, text: str) -> str:
        """A rendering without its common prefix with the prompt, which ends before an added token."""
        shared = _shared_length(prompt, text)
        cut = next(
            (token.start for token in self.renderer.find(text) if token.start < shared < token.end), shared
        )
        return text[cut:]


def _closed(shape: Shape, after: str, stop: Token, sampled_stop: str) -> TurnEnd:
    """The division of the text after the marker, where the turn is closed by a token.

    The close of a turn with calls is only that token: whatever is before it may be syntax of the call.
    """
    start = stop.start if shape.kind == "call" else 0
    return TurnEnd(after[:start], after[start : stop.end], after[stop.end :], stop.text, sampled_stop)


def _unquoted(after: str) -> str:
    """The text after a turn's content, without the end of a list of parts that is printed as such."""
    return after.removeprefix("'}]").removeprefix('"}]')


def _check_new_messages(shape: Shape, prompt: str, before: str, after: str) -> None:
    words = words_of(shape.new)
    if any(word in before and word not in prompt for word in words):
        raise Undecided(Reason.NEW_BEFORE_TURN, before)
    if not all(word in after for word in words):
        raise Undecided(Reason.NEW_NOT_PRINTED, after)
    content = content_of(shape.history[-1])
    if shape.kind == "call" and content and after.rfind(content) > min(after.index(word) for word in words):
        raise Undecided(Reason.REORDERED, after)


def _shared_length(left: str, right: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
