"""How a turn of a corpus template may end, with the ids that follow it according to the oracle."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.templates.generic_oracle import GenericOracle, TurnEnd
from tests.templates.shapes import Message, Shape

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

    oracle: GenericOracle
    shape: Shape
    kwargs: Mapping[str, Any]
    end: TurnEnd
    other_stop: str
    """A stop token of the model that the template does not print."""

    def text(self, history: list[Message]) -> str:
        """The text of the turn, with the whole syntax of its calls and without its close."""
        return self.oracle.turn_text(self.shape, self.kwargs, history) + self.end.tail

    def cut_history(self) -> list[Message]:
        """The history with the turn's content cut to two thirds; a turn with tool calls is not changed."""
        if self.shape.kind == "call":
            return self.shape.history
        *before, last = copy.deepcopy(self.shape.history)
        if isinstance(last["content"], list):
            last["content"][-1]["text"] = two_thirds(last["content"][-1]["text"])
        else:
            last["content"] = two_thirds(last["content"])
        return [*before, last]

    def after_stop(self) -> list[int]:
        """The ids after the turn's own stop token."""
        rest = self.end.rest if self.end.close else self.end.rest.removeprefix(self.end.stop)
        # with the token before it, because a token may absorb the white space after it
        first, *ids = self.oracle.encode(self.end.stop + rest)
        assert self.oracle.decode([first]) == self.end.stop
        return ids


def own_stop(turn: Turn) -> Sampled:
    stop, history = turn.end.sampled_stop, turn.shape.history
    close = turn.end.close.removesuffix(turn.end.stop)
    return Sampled(history, turn.text(history) + close + stop, turn.after_stop(), stop_token=stop)


def length(turn: Turn) -> Sampled:
    """The token limit ended the turn: in its content, or after the syntax of its calls."""
    history = turn.cut_history()
    return Sampled(history, turn.text(history), turn.oracle.encode(turn.end.text), "length")


def abort(turn: Turn) -> Sampled:
    return replace(length(turn), finish_reason="abort")


def other_stop(turn: Turn) -> Sampled:
    """The model ended its turn with another of its stop tokens, in place of the close."""
    history, expected = turn.shape.history, turn.oracle.encode(turn.end.rest)
    return Sampled(history, turn.text(history) + turn.other_stop, expected, stop_token=turn.other_stop)


def stop_string(turn: Turn) -> Sampled:
    history, expected = turn.cut_history(), turn.oracle.encode(turn.end.text)
    text = turn.text(history)
    if turn.shape.kind == "content":
        return Sampled(history, text + _STOP_STRING, expected, stop_string=_STOP_STRING)
    return Sampled(history, text, expected, stop_string=text[-6:])


ENDINGS: dict[str, Callable[[Turn], Sampled]] = {
    "own stop": own_stop,
    "length": length,
    "other stop": other_stop,
    "stop string": stop_string,
    "abort": abort,
}


def two_thirds(text: str) -> str:
    return text[: len(text) * 2 // 3]
