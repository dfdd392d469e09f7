"""How far the trained tokens are from the sampled ones."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

TOLERANCE = 0.1
"""Greatest difference of two log-probabilities of one token that counts as equal."""


@dataclass
class Mismatch:
    """Trained tokens of one step, counted."""

    trained: int = 0
    differing: int = 0
    """Tokens without a recorded log-probability, or whose own differs from it by more than `TOLERANCE`."""
    unsampled: int = 0
    """Tokens without one, because the model did not sample them here."""

    def add(self, mask: Iterable[float], recorded: Iterable[float], computed: Iterable[float]) -> None:
        """Count the tokens of one sequence; a NaN in `recorded` is a token that was not sampled."""
        for trained, sampled, trainer in zip(mask, recorded, computed, strict=True):
            if trained:
                self.trained += 1
                self.unsampled += math.isnan(sampled)
                self.differing += not abs(sampled - trainer) <= TOLERANCE

    @property
    def share(self) -> float:
        """Share of the trained tokens that differ."""
        return self.differing / max(self.trained, 1)

    @property
    def unsampled_share(self) -> float:
        """Share of the trained tokens that were not sampled."""
        return self.unsampled / max(self.trained, 1)


def aligned(sampled: Sequence[int], logprobs: Sequence[float], trained: Sequence[int]) -> list[float]:
    """The recorded log-probability of each trained id, NaN for those that the model did not sample.

    The ids are aligned by their longest common blocks, which favours whoever tokenises again: a trainer that
    pairs ids and log-probabilities by position is off from the first difference on.
    """
    found = [math.nan] * len(trained)
    matcher = SequenceMatcher(None, sampled, trained, autojunk=False)
    for block in matcher.get_matching_blocks():
        found[block.b : block.b + block.size] = logprobs[block.a : block.a + block.size]
    return found


def samples_needed(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """How many training samples hold the turns of a rollout with the ids that the engine used.

    A turn, `(prompt_ids, completion_ids)`, whose prompt does not begin with all ids of the turn before begins
    another sample.
    """
    breaks = 0
    for (prompt, completion), (following, _) in pairwise(turns):
        before = [*prompt, *completion]
        breaks += list(following[: len(before)]) != before
    return 1 + breaks
