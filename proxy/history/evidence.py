"""What an engine answered, and whether it is fit to be trained on.

A turn is a sample only if the number of its ids equals that of its log-probabilities and of its mask's
entries, and the engine says nothing that contradicts them. What does not add up is refused with one of the
words below, never padded.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.history.turn import WeightSpan

PROBLEMS = {
    "no_prompt_ids": "the engine returned no prompt ids",
    "no_completion_ids": "the engine returned no ids of the completion",
    "no_logprobs": "the engine returned no log-probabilities",
    "ids_missing": "the engine returned fewer ids than log-probabilities",
    "logprobs_mismatch": "the numbers of ids and log-probabilities differ",
    "usage_mismatch": "the engine counted another number of tokens than it returned ids",
    "prompt_mismatch": "the engine used another prompt than the one it was given",
    "media": "the prompt holds images or other media, which ids alone do not describe",
    "logprobs_not_finite": "a log-probability is infinite or not a number",
    "missing_parent": "the turn continues one that is not stored",
    "prompt_length_mismatch": "the prompt is not as long as the turn before and what was appended",
}
"""The closed list of problems, with what each means."""


@dataclass(slots=True)
class Sampled:
    """One choice of a completion."""

    index: int = 0
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant's message as the engine parsed it."""
    ids: list[int] | None = None
    """What was sampled, the stop token included; None if the engine did not say."""
    logprobs: list[float] | None = None
    """One for each id; None if the engine gave none."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    counted: int | None = None
    """Number of ids as the engine counted them."""
    weight_versions: tuple[WeightSpan, ...] = ()
    routed_experts: str | None = None


@dataclass(slots=True)
class Outcome:
    """A completion, whole or as far as it came."""

    prompt_ids: bytes | None = None
    """The prompt as the engine echoed it, a JSON array; None if it did not."""
    choices: list[Sampled] = field(default_factory=list)
    completion_tokens: int | None = None
    """Of all choices, as the engine counted them."""


def same_ids(left: bytes, right: bytes) -> bool:
    """Whether two JSON arrays hold the same ids; equal bytes, the usual case, are not parsed."""
    return left == right or msgspec.json.decode(left) == msgspec.json.decode(right)


def problem_of(outcome: Outcome, sampled: Sampled, sent: bytes, media: bool) -> str:
    """Why a choice cannot be trained on, the gravest reason first; "" if it can.

    Args:
        sent: the prompt that the engine was given as a JSON array of ids; empty if it rendered messages.
    """
    if outcome.prompt_ids is None or not outcome.prompt_ids[:64].strip(b"[] \t\r\n"):
        return "no_prompt_ids"
    if sent and not same_ids(sent, outcome.prompt_ids):
        return "prompt_mismatch"
    if sampled.ids is None:
        return "no_completion_ids"
    count = len(sampled.ids)
    if len(sampled.logprobs or ()) > count:
        return "ids_missing"
    together = sum(len(choice.ids or ()) for choice in outcome.choices)
    if sampled.counted not in (None, count) or outcome.completion_tokens not in (None, together):
        return "usage_mismatch"
    if media:
        return "media"
    if sampled.logprobs is None:
        return "no_logprobs"
    return "" if len(sampled.logprobs) == count else "logprobs_mismatch"
