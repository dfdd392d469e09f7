"""A completion as an engine returned it, and whether it can be trained on.

A turn becomes a sample only if the number of its ids equals that of its log-probabilities and no field of the
engine's response contradicts them. A turn with inconsistent evidence is refused with a `Problem`, never
padded.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tokenproxy.base.fields import raw_value, read
from tokenproxy.base.request import PROCESSED_LOGPROBS, ChatRequest, EngineRoute
from tokenproxy.base.types import Fields
from tokenproxy.record.turn import Alternatives, Segment, WeightSpan
from tokenproxy.record.vocabulary import BROKEN_OFF, Problem

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (1,),  # the default may be that of the model's generation_config.json
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (None, 0),
}
"""Sampling parameters that raw log-probabilities leave out, with the values that change no distribution."""


@dataclass(slots=True)
class SampledChoice:
    """One choice of a completion."""

    index: int = 0
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant's message as the engine parsed it."""
    ids: Sequence[int] | None = None
    """The sampled ids, including the stop token; None if the engine returned no ids."""
    logprobs: Sequence[float] | None = None
    """One for each id; None if the engine returned none."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counted: int | None = None
    """Number of ids as counted by the engine."""
    weight_versions: tuple[WeightSpan, ...] = ()
    weights_uncertain: bool = False
    """As `Turn.weights_uncertain`."""
    segments: tuple[Segment, ...] = ()
    """As `Turn.segments`."""
    began_anew: tuple[str, ...] = ()
    """As `Turn.began_anew`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The values of facts of `EVIDENCE`, by their names; None for those that the engine did not report."""
    raw_ids: bytes = b""
    """`ids` as a compact JSON array; empty if they were not kept in this form."""
    alternatives: Alternatives = field(default_factory=list)
    """One list for each id; empty if the engine returned none."""
    unreadable: str = ""
    """Names of the evidence fields that could not be read; empty if all could."""
    prompt_ids: bytes | None = None
    """The prompt of this choice as the engine echoed it, where a request has several prompts: see
    `Completion.by_prompt`."""


UNCHANGED = ("finish_reason", "stop_reason", "weight_versions", "weights_uncertain", "segments", "began_anew")
"""The fields of a choice that its turn holds as they are."""


class Batch(NamedTuple):
    """The prompts of a request of the completions route, whose choices come prompt by prompt."""

    prompts: tuple[bytes, ...]
    """Each as it was sent, a JSON array of ids; empty if the engine converts a text."""
    choices: int
    """The number of choices of each prompt."""

    def prompt_of(self, choice: int) -> int:
        """The position of the prompt of a choice, given the choice's index in the response."""
        return min(choice // self.choices, len(self.prompts) - 1)


@dataclass(slots=True)
class Completion:
    """A completion, whole or as far as it arrived."""

    prompt_ids: bytes | None = None
    """The prompt that the engine echoed, a JSON array; None if it echoed none."""
    choices: list[SampledChoice] = field(default_factory=list)
    completion_tokens: int | None = None
    """Number of sampled ids in all choices, as counted by the engine."""
    cached_tokens: int | None = None
    """Number of prompt ids from the engine's prefix cache; None if the engine did not tell."""
    odd: int = field(default=0, compare=False)
    """How many of its chunks had a shape that is not declared, and were read slowly."""
    why_odd: str = field(default="", compare=False)
    """What was odd about one of them."""
    packed_prompt: bytes | None = field(default=None, compare=False)
    """The ids of `prompt_ids`, packed; None if they were not converted yet."""

    @property
    def broken_off(self) -> bool:
        """Whether the engine did not end one of the choices."""
        return any(choice.finish_reason in BROKEN_OFF for choice in self.choices)

    @property
    def sampled(self) -> int:
        """Number of sampled ids in all choices."""
        return sum([len(choice.ids or ()) for choice in self.choices])

    def by_prompt(self, batch: Batch) -> "dict[int, Completion]":
        """The completion of each prompt that has choices here, by the position of the prompt.

        Example: with two choices of each prompt, those with the indexes 2 and 3 belong to prompt 1.
        """
        parts: dict[int, Completion] = {}
        for choice in self.choices:
            part = parts.setdefault(batch.prompt_of(choice.index), Completion())
            part.prompt_ids = part.prompt_ids or choice.prompt_ids
            part.choices.append(choice)
        if self.completion_tokens is not None:
            # the engine counts all choices together: a difference shows in each part
            surplus = self.completion_tokens - self.sampled
            for part in parts.values():
                part.completion_tokens = part.sampled + surplus
        return parts


def logprobs_without(request: ChatRequest, mode: str) -> tuple[str, ...]:
    """See `Turn.logprobs_without`; `mode` is the server's `--logprobs-mode`."""
    if mode == PROCESSED_LOGPROBS:
        return ()
    sampling: Mapping[str, msgspec.Raw] = request.fields
    if request.engine_route is EngineRoute.GENERATE:
        sampling = read(sampling, "sampling_params", Fields) or {}
    return tuple([name for name, neutral in _NEUTRAL.items() if _value(sampling, name) not in neutral])


def _value(sampling: Mapping[str, msgspec.Raw], name: str) -> object:
    """The value of a parameter; its JSON if that cannot be read, as `{"5":1e999}`."""
    value = raw_value(sampling, name)
    try:
        return None if value is None else msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return value


def untrainable_reason(
    completion: Completion, choice: SampledChoice, sent: bytes, *, media: bool
) -> Problem | None:
    """The most severe problem that makes a choice untrainable; None if there is none.

    Args:
        sent: the prompt that was sent to the engine, as a JSON array of ids; empty if it rendered messages.
    """
    if completion.prompt_ids is None or not completion.prompt_ids[:64].strip(b"[] \t\r\n"):
        odd = choice.unreadable == "prompt_token_ids"
        return Problem.UNREADABLE_EVIDENCE if odd else Problem.NO_PROMPT_IDS
    # equal bytes, the usual case, are not parsed
    differs = sent not in (b"", completion.prompt_ids)
    if differs and msgspec.json.decode(sent) != msgspec.json.decode(completion.prompt_ids):
        return Problem.PROMPT_MISMATCH
    if choice.unreadable:
        return Problem.UNREADABLE_EVIDENCE
    if choice.ids is None:
        return Problem.NO_COMPLETION_IDS
    count = len(choice.ids)
    if len(choice.logprobs or ()) > count:
        return Problem.IDS_MISSING
    if choice.counted not in (None, count) or completion.completion_tokens not in (None, completion.sampled):
        return Problem.USAGE_MISMATCH
    if media:
        return Problem.MEDIA
    if choice.logprobs is None:
        return Problem.NO_LOGPROBS
    if len(choice.logprobs) != count:
        return Problem.LOGPROBS_MISMATCH
    # in whose precision a large number is infinite; a sum of finite ones is finite in double precision
    stored = array("f", choice.logprobs)
    return None if math.isfinite(sum(stored)) else Problem.LOGPROBS_NOT_FINITE
