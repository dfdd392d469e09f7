"""How long a replica takes for its work, measured on its responses.

Work is counted in sampled ids: reading one id of a prompt that is not in the prefix cache costs a sixteenth
of sampling one. An engine samples for many conversations at once, so further ones slow the others by less
than their share, and on an idle GPU not at all:

    seconds of a response = pace * work * (1 + conversations on the replica) ** crowding

The pace belongs to one replica, the exponent to the fleet. It is the slope of the logarithm of the time over
that of the load, fitted to the deviations of each replica from its own means, because a slow replica has the
smaller load (the pooled slope within groups of the analysis of covariance, R. A. Fisher, 1932). Older
responses count less.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

READ_PER_SAMPLED = 16.0
"""Prompt ids that are read in the time in which one id is sampled. The choice depends little on it."""
_STEP = 0.2
"""Share of a deviation by which a replica's means are corrected."""
_FORGOTTEN = 0.02
"""Share of the sums of deviations that is forgotten for each squared deviation of a load that is added."""
_LEAST_CROWDING = 0.5
"""The least exponent for choices, so that equal replicas are used evenly even if conversations slow
nothing."""
_LARGEST_ERROR = 1.0
"""Limit of an error of the logarithm: a response that took 100 times too long corrects as much as one that
took e times too long."""


def work_of(completion_ids: float, prompt_ids: float) -> float:
    """The work of a turn in sampled ids.

    Args:
        prompt_ids: number of prompt ids that are not in the prefix cache.
    """
    return max(1.0, completion_ids + prompt_ids / READ_PER_SAMPLED)


@dataclass(slots=True)
class Crowding:
    """How further conversations on a replica slow its responses."""

    exponent: float = 1.0
    """0: not at all; 1: n conversations take n times as long."""
    _loads: float = 1.0
    """Sum of squared deviations of loads. It starts with one in which the time grew with the load."""
    _products: float = 1.0
    """Sum of products of the deviations of loads and times."""

    @property
    def for_choice(self) -> float:
        """The exponent that choices use."""
        return max(self.exponent, _LEAST_CROWDING)

    def measure(self, load: float, time: float) -> None:
        """Note by how much the logarithms of a load and a time deviate from the replica's means."""
        kept = 1 - _FORGOTTEN * min(1.0, load * load)
        self._loads = kept * self._loads + load * load
        self._products = kept * self._products + load * time
        self.exponent = min(1.0, max(0.0, self._products / self._loads))


@dataclass(slots=True)
class Pace:
    """The pace of one replica."""

    clock: Callable[[], float] = time.monotonic
    _mean_load: float = 0.0
    """Of the logarithm."""
    _mean_time: float | None = None
    """Of the logarithm of the seconds for an id; None before the first response."""
    _measured_at: float = 0.0

    def seconds(self, crowding: Crowding) -> float | None:
        """Seconds for an id with no other conversation on the replica; None before the first response."""
        if self._mean_time is None:
            return None
        return math.exp(self._mean_time - crowding.exponent * self._mean_load)

    @property
    def age_s(self) -> float:
        """Seconds since the last measurement."""
        return self.clock() - self._measured_at

    def measure(self, seconds: float, work: float, load: float, crowding: Crowding) -> None:
        """Take note of a response.

        Args:
            load: conversations on the replica when its request was sent, without its own.
            crowding: the fleet's, which gets the deviations.
        """
        self._measured_at = self.clock()
        time_log, load_log = math.log(max(seconds, 1e-6) / work), math.log1p(load)
        if self._mean_time is None:
            self._mean_time, self._mean_load = time_log, load_log
            return
        deviation = load_log - self._mean_load
        error = time_log - self._mean_time - crowding.exponent * deviation
        error = min(_LARGEST_ERROR, max(-_LARGEST_ERROR, error))
        time_deviation = error + crowding.exponent * deviation
        crowding.measure(deviation, time_deviation)
        self._mean_load += _STEP * deviation
        self._mean_time += _STEP * time_deviation


@dataclass(slots=True)
class ExpectedLength:
    """Average number of ids in a completion."""

    ids: float = 200.0

    def measure(self, completion_ids: int) -> None:
        """Note a completion."""
        self.ids += 0.05 * (completion_ids - self.ids)
