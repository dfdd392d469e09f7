"""Sampled turns: the text of a turn as the template prints it, how the turn ended, and unusual ids for it.

A model may sample other ids for a text than the tokenizer chooses. So the text of a turn is split at random
places and each piece is encoded by itself; only added tokens stay whole.
"""

import copy
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tests.templates.families import Close
from tests.templates.oracle import Oracle, TextAfterTurn, marked
from tests.templates.shapes import Message, Shape

_MARK = "Zsampledz"
_STOP_STRING = " END"


@dataclass(frozen=True)
class Sampled:
    """A turn that an engine returned."""

    history: list[Message]
    """The conversation up to and including this turn, as the engine parsed it."""
    text: str
    """The sampled text, including a stop token at its end."""
    sampled_close: str
    """The start of the template's text after the turn that was sampled, as the template spells it."""
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
    """A conversation whose last turn is to be sampled."""

    oracle: Oracle
    shape: Shape
    kwargs: Mapping[str, Any]
    after: TextAfterTurn
    _texts: dict[str, str] = field(default_factory=dict)

    @cached_property
    def close(self) -> Close:
        return self.oracle.close_of(self.shape, self.kwargs)

    @cached_property
    def prompt(self) -> str:
        """The text of the prompt."""
        before = self.shape.history[:-1]
        return self.oracle.render(before, self.shape, {**self.kwargs, "add_generation_prompt": True})

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt, as the engine tokenises it."""
        return self.oracle.encode(self.prompt)

    def text(self, history: list[Message]) -> str:
        """The text of the turn after the prompt, without its close."""
        key = repr(history[-1])
        if key not in self._texts:
            self._texts[key] = self._text(history)
        return self._texts[key]

    def _text(self, history: list[Message]) -> str:
        *before, last = marked(history, _MARK)
        if "reasoning_content" in last:
            # GPT-OSS and LFM2.5 read reasoning under this name
            last["thinking"] = last["reasoning_content"]
        whole = self.oracle.render(
            [*before, last], self.shape, {**self.kwargs, "add_generation_prompt": False}
        )
        begin = self._end_of_prompt(whole)
        return whole[begin : whole.rindex(_MARK)] + (self.after.tail if self.shape.kind == "call" else "")

    def _end_of_prompt(self, whole: str) -> int:
        """The length of the common prefix of a rendering and the prompt, ending before an added token."""
        pairs = enumerate(zip(self.prompt, whole, strict=False))
        shared = next((index for index, (left, right) in pairs if left != right), len(self.prompt))
        tokens = self.oracle.added_tokens.finditer(whole)
        return next((token.start() for token in tokens if token.start() < shared < token.end()), shared)

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


def own_stop(turn: Turn) -> Sampled:
    stop = turn.close.stop(turn.shape.new[0]["role"])
    history = turn.shape.history
    sampled_close = turn.after.close or turn.after.opener
    return Sampled(
        history, turn.text(history) + stop, sampled_close, stop_token=re.findall("<.*?>", stop)[-1]
    )


def alternate_stop(turn: Turn) -> Sampled:
    """The model ended its turn with another stop token in place of the close."""
    stop = turn.oracle.template.family.alternate or ""
    history = turn.shape.history
    return Sampled(history, turn.text(history) + stop, turn.after.close, stop_token=stop)


def part_of_the_close(turn: Turn) -> Sampled:
    """The token limit cut the turn off between the tokens of its close."""
    first = re.findall("<.*?>", turn.after.close)[0]
    history = turn.shape.history
    return Sampled(history, turn.text(history) + first, first, "length")


def stop_string(turn: Turn) -> Sampled:
    history = turn.cut_history()
    text = turn.text(history)
    if turn.shape.kind == "content":
        return Sampled(history, text + _STOP_STRING, "", stop_string=_STOP_STRING)
    return Sampled(history, text, "", stop_string=text[-6:])


def length(turn: Turn) -> Sampled:
    history = turn.cut_history()
    return Sampled(history, turn.text(history), "", "length")


def abort(turn: Turn) -> Sampled:
    return replace(length(turn), finish_reason="abort")


def abort_at_once(turn: Turn) -> Sampled:
    """The turn was aborted before its first token."""
    *before, last = turn.shape.history
    return Sampled([*before, {**last, "content": ""}], "", "", "abort")


def length_in_reasoning(turn: Turn) -> Sampled:
    *before, last = turn.shape.history
    reasoning = _two_thirds(last["reasoning_content"])
    text = turn.text(turn.shape.history)
    whole_reasoning = last["reasoning_content"]
    if whole_reasoning in text:
        text = text[: text.index(whole_reasoning) + len(reasoning)]
    else:
        # a model may write reasoning even if its template prints none
        text = f"<think>\n{reasoning}"
    return Sampled([*before, {**last, "content": "", "reasoning_content": reasoning}], text, "", "length")


ENDINGS: dict[str, Callable[[Turn], Sampled]] = {
    "own stop": own_stop,
    "length": length,
    "alternate stop": alternate_stop,
    "part of the close": part_of_the_close,
    "stop string": stop_string,
    "abort": abort,
    "abort at once": abort_at_once,
    "length in reasoning": length_in_reasoning,
}


def applies(ending: str, shape: Shape, oracle: Oracle, kwargs: Mapping[str, Any]) -> bool:
    """Whether a turn of this shape can end in this way."""
    if ending == "alternate stop":
        return oracle.template.family.alternate is not None
    if ending == "part of the close":
        return oracle.close_of(shape, kwargs).shown.count("><") > 0
    if ending == "abort at once":
        return shape.name == "content"
    if ending == "length in reasoning":
        return shape.name == "reasoning"
    return True


def sampled_ids(text: str, seed: str, oracle: Oracle) -> list[int]:
    """Ids of a text other than those the tokenizer chooses; equal for equal seeds."""
    rng = random.Random(seed)
    ids: list[int] = []
    end = 0
    for token in oracle.added_tokens.finditer(text):
        for chunk in [*_chunks(text[end : token.start()], rng), token.group()]:
            ids += oracle.encode(chunk)
        end = token.end()
    for chunk in _chunks(text[end:], rng):
        ids += oracle.encode(chunk)
    return ids


def _chunks(text: str, rng: random.Random) -> list[str]:
    chunks = []
    while text:
        size = rng.randint(1, 6)
        chunks.append(text[:size])
        text = text[size:]
    return chunks


def _two_thirds(text: str) -> str:
    return text[: len(text) * 2 // 3]
