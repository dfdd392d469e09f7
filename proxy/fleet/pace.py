"""How long a replica takes for its work, measured on its responses.

Work is counted in sampled ids: reading one id of a prompt that is not in the prefix cache costs a sixteenth
of sampling one. The pace is the exponential mean of recent turns.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

READ_PER_SAMPLED = 16.0
"""Prompt ids that are read in the time in which one id is sampled. The choice depends little on it."""
_STEP = 0.2
"""Share of a turn in the mean."""


def work_of(completion_ids: float, prompt_ids: float) -> float:
    """The work of a turn in sampled ids.

    Args:
        prompt_ids: number of prompt ids that are not in the prefix cache.
    """
    return max(1.0, completion_ids + prompt_ids / READ_PER_SAMPLED)


@dataclass(slots=True)
class Pace:
    """The pace of one replica."""

    clock: Callable[[], float] = time.monotonic
    seconds: float | None = None
    """Mean seconds for the work of sampling one id; None before the first response."""
    _measured_at: float = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the last measurement."""
        return self.clock() - self._measured_at

    def measure(self, seconds: float, work: float) -> None:
        """Take note of a response."""
        self._measured_at = self.clock()
        measured = max(seconds, 1e-6) / work
        self.seconds = measured if self.seconds is None else self.seconds + _STEP * (measured - self.seconds)


@dataclass(slots=True)
class ExpectedLength:
    """Average number of ids in a completion."""

    ids: float = 200.0

    def measure(self, completion_ids: int) -> None:
        """Note a completion."""
        self.ids += 0.05 * (completion_ids - self.ids)
