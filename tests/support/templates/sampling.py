"""How a sampled turn may end, with the ids that follow it according to the oracle."""

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.support.templates.oracle import Oracle, TurnEnd
from tests.support.templates.shapes import Message, Shape

_STOP_STRING = " END"


@dataclass(frozen=True)
class Sampled:
    """A turn that an engine returned."""

    history: list[Message]
    """The conversation up to and including this turn, as the engine parsed it."""
    text: str
    """The sampled text, including a stop token at its end."""
    expected: list[int]
    """The ids to append."""
    finish_reason: str = "stop"
    stop_token: str = ""
    stop_string: str = ""

    def stop_reason(self, eos: str, id_of: Callable[[str], int]) -> int | str | None:
        """What vLLM reports: a stop string, the id of a stop token other than EOS, or None."""
        if self.stop_string:
            return self.stop_string
        return id_of(self.stop_token) if self.stop_token not in ("", eos) else None


@dataclass(frozen=True)
class Turn:
    """A conversation whose last turn was sampled, and what the template prints after it."""

    oracle: Oracle
    shape: Shape
    kwargs: Mapping[str, Any]
    end: TurnEnd
    other_stop: str
    """A stop token of the model that does not close its turns."""

    def text(self, history: list[Message]) -> str:
        """The text of the turn, with the whole syntax of its calls and without its close."""
        return self.oracle.turn_text(self.shape, self.kwargs, history) + self.end.tail

    def cut_history(self) -> list[Message]:
        """The history with the turn's content cut to two thirds; a turn with tool calls is not changed."""
        if self.shape.kind == "call":
            return self.shape.history
        *before, last = copy.deepcopy(self.shape.history)
        if isinstance(last["content"], list):
            last["content"][-1]["text"] = _two_thirds(last["content"][-1]["text"])
        else:
            last["content"] = _two_thirds(last["content"])
        return [*before, last]

    def after_stop(self) -> list[int]:
        """The ids after the turn's own stop token."""
        if not self.end.stop:
            return self.oracle.encode_within(self.end.rest)
        rest = self.end.rest if self.end.close else self.end.rest.partition(self.end.stop)[2]
        # with the token before it, because a token may absorb the white space after it
        first, *ids = self.oracle.encode(self.end.stop + rest)
        assert self.oracle.decode([first]) == self.end.stop
        return ids

    def whole_end(self) -> list[int]:
        """The ids after a turn of which nothing was sampled but its own text."""
        return self.oracle.encode_within(self.end.text)

    @property
    def tokens_of_close(self) -> list[str]:
        return self.oracle.renderer.added_tokens.findall(self.end.close)


def own_stop(turn: Turn) -> Sampled:
    stop, history = turn.end.sampled_stop, turn.shape.history
    close = turn.end.text.partition(turn.end.stop)[0] if turn.end.stop else ""
    return Sampled(history, turn.text(history) + close + stop, turn.after_stop(), stop_token=stop)


def length(turn: Turn) -> Sampled:
    """The token limit ended the turn: in its content, or after the syntax of its calls."""
    history = turn.cut_history()
    return Sampled(history, turn.text(history), turn.whole_end(), "length")


def other_stop(turn: Turn) -> Sampled:
    """The model ended its turn with another of its stop tokens, in place of the close."""
    history = turn.shape.history
    # a stop token that opens the next message is not replaced
    closed = turn.end.close and not turn.end.may_open
    expected = turn.after_stop() if closed else turn.whole_end()
    # a second token of the close would be a second stop
    second = turn.oracle.second_stop(turn.end.rest) if closed else ""
    if second:
        first, *expected = turn.oracle.encode(second + turn.end.rest.partition(second)[2])
        assert turn.oracle.decode([first]) == second
    return Sampled(history, turn.text(history) + turn.other_stop, expected, stop_token=turn.other_stop)


def part_of_the_close(turn: Turn) -> Sampled:
    """The token limit cut the turn off between the tokens of its close."""
    history, token = turn.shape.history, turn.tokens_of_close[0]
    sampled_close = turn.end.close.partition(token)[0] + token
    expected = turn.whole_end()[len(turn.oracle.encode(sampled_close)) :]
    return Sampled(history, turn.text(history) + sampled_close, expected, "length")


def stop_string(turn: Turn) -> Sampled:
    history = turn.cut_history()
    text = turn.text(history)
    if turn.shape.kind == "content":
        return Sampled(history, text + _STOP_STRING, turn.whole_end(), stop_string=_STOP_STRING)
    return Sampled(history, text, turn.whole_end(), stop_string=text[-6:])


def abort(turn: Turn) -> Sampled:
    return replace(length(turn), finish_reason="abort")


def abort_at_once(turn: Turn) -> Sampled:
    """The turn was aborted before its first token."""
    *before, last = turn.shape.history
    return Sampled([*before, {**last, "content": ""}], "", turn.whole_end(), "abort")


def length_in_reasoning(turn: Turn) -> Sampled:
    *before, last = turn.shape.history
    whole = last["reasoning_content"]
    reasoning = _two_thirds(whole)
    text = turn.text(turn.shape.history)
    # a model may write reasoning even if its template prints none
    text = text[: text.index(whole)] + reasoning if whole in text else f"<think>\n{reasoning}"
    history = [*before, {**last, "content": "", "reasoning_content": reasoning}]
    return Sampled(history, text, turn.whole_end(), "length")


ENDINGS: dict[str, Callable[[Turn], Sampled]] = {
    "own stop": own_stop,
    "length": length,
    "other stop": other_stop,
    "part of the close": part_of_the_close,
    "stop string": stop_string,
    "abort": abort,
    "abort at once": abort_at_once,
    "length in reasoning": length_in_reasoning,
}
COMMON_ENDINGS = ("own stop", "length", "other stop", "stop string", "abort")
"""Endings that every turn may have."""
ENDINGS_OF_EVERY_SHAPE = ("own stop", "length")
_ENDINGS_OF_ONE_SHAPE = {"abort at once": "content", "length in reasoning": "reasoning"}


def applies(ending: str, turn: Turn) -> bool:
    """Whether a turn of this shape can end in this way."""
    if ending == "part of the close":
        return len(turn.tokens_of_close) > 1
    return _ENDINGS_OF_ONE_SHAPE.get(ending, turn.shape.name) == turn.shape.name


def sampled_ids(text: str, seed: str, oracle: Oracle) -> list[int]:
    """Ids of a text other than those the tokenizer chooses; equal for equal seeds.

    A model may sample other ids for a text than the tokenizer chooses. So the text is split at random places
    and each piece is encoded by itself; only added tokens stay whole.
    """
    rng = random.Random(seed)
    ids: list[int] = []
    for piece in re.split(f"({oracle.renderer.added_tokens.pattern})", text):
        while piece:
            size = len(piece) if oracle.renderer.added_tokens.fullmatch(piece) else rng.randint(1, 6)
            ids += oracle.encode(piece[:size])
            piece = piece[size:]
    return ids


def _two_thirds(text: str) -> str:
    return text[: len(text) * 2 // 3]
