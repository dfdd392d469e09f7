"""Chooses the replica for a request: the one that holds its conversation, unless another is much faster.

How long a turn takes on each replica is estimated:

    (1 + conversations on the replica) * pace of the replica * (ids to sample + ids to read / 16)

Conversations are weighted by their ids; paces are measured, see `load.py`. The replica that holds the
conversation reads only its new ids; any other replica reads all of them.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The facts of one request that decide where it runs, and whether it may run again."""

    conversation: str = ""
    """A key that is equal for all turns of the conversation; empty if the conversation cannot be told."""
    holder: str = ""
    """Name of the replica that holds the ids of its history; empty if none does."""
    held_since: float = 0.0
    """When that replica served them, in seconds since the epoch; 0 if unknown."""
    ids: int = 0
    """Approximate number of ids in its prompt."""
    reused: int = 0
    """Number of these ids in the holder's prefix cache."""
    tenant: str = ""
    model: str = ""
    """The model that it names; empty if none."""
    repeatable: bool = True
    """Whether it may run again if no byte of a response was sent to the client."""
    samples: bool = True
    """Whether the engine's weights matter for it. Others are served while the fleet is paused, too."""
    completion: bool = False
    """Whether a successful response must be a chat completion."""
    digest: Callable[[], bytes] | None = None
    """Computes a digest that equal requests share; None for requests that cannot break an engine."""


BYTES_PER_ID = 4
"""Approximate number of a request's bytes for each id, where the ids are not counted."""


def body_digest(path: str, body: bytes) -> bytes:
    """A digest of 16 bytes that equal requests share."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()


OVERLOAD_RATIO = 1.5
"""How many times longer than elsewhere a turn must be expected to take on the replica that holds its
conversation before the conversation moves."""
_PACE_HALF_LIFE_S = 60.0
"""Seconds without a measurement after which a replica counts as half as much slower than the fastest one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The facts about a replica that the choice for one request uses."""

    name: str
    requests: int = 0
    """How many run on it."""
    conversations: float = 0.0
    """Number of its active conversations, each weighted by its ids; one of average length counts 1."""
    pace: float | None = None
    """Mean seconds for the work of sampling one id; None if none was measured."""
    pace_age_s: float = 0.0
    """Seconds since it was measured."""
    work: float = 1.0
    """The work of the request there: less if the replica has a part of the prompt in its prefix cache."""


Choose = Callable[[Sequence[Candidate], str], Candidate]
"""From the candidates and the name of the one that holds the conversation, or an empty one, to the chosen."""


def sticky_least_loaded(candidates: Sequence[Candidate], holder: str) -> Candidate:
    """The holder of the conversation, unless a turn takes much less time on another replica."""
    # a replica without a measured pace counts as fast as the fastest, so that it gets requests to measure
    fastest = min((each.pace for each in candidates if each.pace is not None), default=1.0)

    def seconds(candidate: Candidate) -> float:
        """How long a turn is expected to take on a replica."""
        pace = fastest
        if candidate.pace is not None:
            # an old measurement counts less, so that a replica that was slow is tried again
            pace *= (candidate.pace / fastest) ** (0.5 ** (candidate.pace_age_s / _PACE_HALF_LIFE_S))
        return (1 + candidate.conversations) * pace * candidate.work

    best = min(candidates, key=lambda each: (seconds(each), each.requests, random.random()))
    stay = next((each for each in candidates if each.name == holder), best)
    return best if seconds(stay) > OVERLOAD_RATIO * seconds(best) else stay
