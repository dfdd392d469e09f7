"""Chooses the replica for a request: the one that holds its conversation, unless another is much faster.

How long a turn takes on each replica is estimated:

    (1 + conversations on the replica) * pace of the replica * (ids to sample + ids to read / 16)

Conversations are weighted by their ids; paces are measured, see `load.py`. The replica that holds the
conversation reads only its new ids; any other replica reads all of them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.fleet.load import work_of

OVERLOAD_RATIO = 1.5
"""How many times longer than elsewhere a turn must be expected to take on the replica that holds its
conversation before the conversation moves."""
_PACE_HALF_LIFE_S = 60.0
"""Seconds without a measurement after which a replica counts as half as much slower than the fastest one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The facts about a replica that the choice uses."""

    name: str
    requests: int = 0
    """How many run on it."""
    conversations: float = 0.0
    """Number of its active conversations, each weighted by its ids; one of average length counts 1."""
    pace: float | None = None
    """Mean seconds for the work of sampling one id; None if none was measured."""
    pace_age_s: float = 0.0
    """Seconds since it was measured."""


@dataclass(frozen=True, slots=True)
class Preference:
    """The facts about a request that the choice uses."""

    holder: str = ""
    """The replica that holds the prefix of the request's conversation; empty if none does."""
    ids: int = 0
    """Approximate number of ids in its prompt."""
    reused: int = 0
    """Number of the prompt's ids that the holder has in its prefix cache."""
    completion_ids: float = 0.0
    """Expected number of sampled ids."""


Choose = Callable[[Sequence[Candidate], Preference], Candidate]


def sticky_least_loaded(candidates: Sequence[Candidate], preference: Preference) -> Candidate:
    """The holder of the prefix, unless a turn takes much less time on the replica that serves it soonest."""
    # a replica without a measured pace counts as fast as the fastest, so that it gets requests to measure
    fastest = min((each.pace for each in candidates if each.pace is not None), default=1.0)

    def seconds(candidate: Candidate) -> float:
        """How long a turn is expected to take on a replica."""
        cached = preference.reused if candidate.name == preference.holder else 0
        pace = fastest
        if candidate.pace is not None:
            # an old measurement counts less, so that a replica that was slow is tried again
            pace *= (candidate.pace / fastest) ** (0.5 ** (candidate.pace_age_s / _PACE_HALF_LIFE_S))
        work = work_of(preference.completion_ids, preference.ids - cached)
        return (1 + candidate.conversations) * pace * work

    best = min(candidates, key=lambda each: (seconds(each), each.requests, random.random()))
    holder = next((each for each in candidates if each.name == preference.holder), None)
    if holder is None or seconds(holder) > OVERLOAD_RATIO * seconds(best):
        return best
    return holder
