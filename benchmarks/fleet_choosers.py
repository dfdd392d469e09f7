"""Ways to choose a replica for a turn, for the simulation: policies in use elsewhere, and ideas next to them.

A chooser knows what a proxy knows: the requests that it sent and the responses that it got. It does not see
an engine's queue or cache.
"""

import bisect
import hashlib
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class Request:
    """A turn that needs a replica."""

    conversation: int
    turn: int
    session: bool
    """Whether the client names its session."""
    prompt_ids: int
    appended_ids: int
    blocks: Sequence[Hashable]
    """Keys of the prompt's full blocks; stands for its text."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a proxy learns from the response to a turn."""

    request: Request
    replica: int
    seconds: float
    completion_ids: int
    cached_ids: int


class Chooser:
    """Counts the requests in flight; a policy overrides `_pick`."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = [0] * replicas
        self.random = random.Random(1)

    def choose(self, request: Request, now: float) -> int:
        """The replica for a request, which is sent at once."""
        replica = self._pick(request, now)
        self.in_flight[replica] += 1
        return replica

    def finished(self, response: Response, now: float) -> None:
        """Note a response."""
        self.in_flight[response.replica] -= 1

    def ended(self, conversation: int) -> None:
        """Note that a conversation is over, where clients say so."""

    def _pick(self, request: Request, now: float) -> int:
        raise NotImplementedError

    def _least(self, loads: Sequence[float]) -> int:
        """The index of the smallest load, at random among equal ones."""
        least = min(loads)
        return self.random.choice([index for index, load in enumerate(loads) if load == least])


class RoundRobin(Chooser):
    """One after the other."""

    _next = 0

    def _pick(self, request: Request, now: float) -> int:
        self._next += 1
        return self._next % len(self.in_flight)


class LeastLoaded(Chooser):
    """The fewest requests in flight."""

    def _pick(self, request: Request, now: float) -> int:
        return self._least(self.in_flight)


class TwoChoices(Chooser):
    """Of two random replicas the one with fewer requests in flight."""

    def _pick(self, request: Request, now: float) -> int:
        first, second = self.random.sample(range(len(self.in_flight)), 2)
        return first if self.in_flight[first] <= self.in_flight[second] else second


class ConsistentHash(Chooser):
    """vllm-router's `consistent_hash`: a ring of 160 points for each replica.

    The key is the session id. Requests without one have the same key: version 0.1.17 was seen to send all of
    them to one replica.
    """

    def __init__(self, replicas: int, *, all_sessions: bool = True) -> None:
        super().__init__(replicas)
        self._all_sessions = all_sessions
        points = [(_digest(f"{replica}:{n}"), replica) for replica in range(replicas) for n in range(160)]
        self._points, self._replicas = zip(*sorted(points), strict=True)

    def _pick(self, request: Request, now: float) -> int:
        named = self._all_sessions or request.session
        key = f"{request.conversation}" if named else "none"
        at = bisect.bisect(self._points, _digest(key)) % len(self._points)
        replica: int = self._replicas[at]
        return replica


class CacheAware(Chooser):
    """vllm-router's `cache_aware` with the defaults of its command, without evictions from its tree.

    The replica that was sent the longest part of the text; the one with the fewest requests in flight if that
    part is at most 30 %, or if the loads differ by more than 64 requests and 50 %. A session that it has seen
    stays where it is. Version 0.1.17 itself spreads conversations more than this, with half the hit rate.
    """

    def __init__(
        self, replicas: int, *, all_sessions: bool = True, threshold: float = 0.3, apart: int = 64
    ) -> None:
        super().__init__(replicas)
        self._all_sessions, self._threshold, self._apart = all_sessions, threshold, apart
        self._sent_to: dict[Hashable, int] = {}
        """The replica that was sent a block last."""
        self._sessions: dict[int, int] = {}

    def _pick(self, request: Request, now: float) -> int:
        most, least = max(self.in_flight), min(self.in_flight)
        named = self._all_sessions or request.session
        if most - least > self._apart and most > 1.5 * least:
            replica = self._least(self.in_flight)
        elif named and request.conversation in self._sessions:
            replica = self._sessions[request.conversation]
        else:
            replica = self._by_text(request)
        if named:
            self._sessions[request.conversation] = replica
        self._sent_to.update(dict.fromkeys(request.blocks, replica))
        return replica

    def _by_text(self, request: Request) -> int:
        matched = 0
        while matched < len(request.blocks) and request.blocks[matched] in self._sent_to:
            matched += 1
        if matched > self._threshold * max(1, len(request.blocks)):
            return self._sent_to[request.blocks[matched - 1]]
        return self._least(self.in_flight)


class RouterSticky(Chooser):
    """vllm-router's `sticky_least_loaded`: a new session goes to the replica with the fewest sessions.

    Sessions count for two hours, or until the client calls `/finish_session`; requests without a session id
    are spread by a hash among the replicas with the fewest sessions.
    """

    def __init__(self, replicas: int, *, all_sessions: bool = True) -> None:
        super().__init__(replicas)
        self._all_sessions = all_sessions
        self._sessions: dict[int, int] = {}
        self._counts = [0] * replicas

    def _pick(self, request: Request, now: float) -> int:
        if not (self._all_sessions or request.session):
            return self._least(self._counts)
        if request.conversation not in self._sessions:
            replica = self._sessions[request.conversation] = self._least(self._counts)
            self._counts[replica] += 1
        return self._sessions[request.conversation]

    def ended(self, conversation: int) -> None:
        """`POST /finish_session`, from the clients whose sessions are all named."""
        if self._all_sessions:
            self._counts[self._sessions.pop(conversation)] -= 1


@dataclass(frozen=True, slots=True)
class Idea:
    """How a sticky policy weighs replicas. By default: the fewest requests in flight, and no moves."""

    load: Literal["requests", "conversations", "ids"] = "requests"
    """Requests in flight, active conversations, or thousands of prompt ids of active conversations."""
    measured: bool = False
    """Whether the replicas' paces are measured; else all replicas count as equally fast."""
    move: float = 0.0
    """Move a conversation where its turn costs less than this share of what it costs at home; 0 never."""
    reported: bool = False
    """Whether engines report how many ids of a prompt were cached; else the policy assumes its own view."""
    weight: float = 16.0
    """Ids to prefill that cost as much as one to sample."""


_ACTIVE_S = 1.0
"""How long after its last response a conversation counts as active: seven mean pauses."""
_MEMORY = 0.8
"""Share of the old value when a pace is measured."""


class Sticky(Chooser):
    """A conversation stays on its replica; a new one goes where its turn is estimated to cost least.

        cost = (load + 1) * pace * work,  work = expected completion ids + ids to prefill / weight

    Where the conversation was served before, only what is new of its prompt is to be prefilled, elsewhere all
    of it. The pace of a replica is the time of its responses / (work * (load + 1) when they were sent).
    """

    def __init__(self, replicas: int, idea: Idea) -> None:
        super().__init__(replicas)
        self._idea = idea
        self._home: dict[int, int] = {}
        self._active: dict[int, tuple[float, int]] = {}
        """When a conversation was last active (infinity for a turn in flight), and its ids."""
        self._paces: list[float | None] = [None] * replicas
        self._sent: dict[int, tuple[float, int]] = {}
        """Load of the replica without a turn in flight, and the ids that it was thought to prefill."""
        self._completion_ids = 200.0

    def _pick(self, request: Request, now: float) -> int:
        loads = self._loads(now, request.conversation)
        home = self._home.get(request.conversation)
        prefill = [
            request.appended_ids if replica == home else request.prompt_ids for replica in range(len(loads))
        ]
        if self._idea.measured:
            paces = self._measured_paces()
            costs = [
                (load + 1) * pace * self._work(self._completion_ids, ids)
                for load, pace, ids in zip(loads, paces, prefill, strict=True)
            ]
        else:
            costs = loads
        best = self._least(costs)
        if home is not None and costs[best] >= self._idea.move * costs[home]:
            best = home
        self._home[request.conversation] = best
        self._active[request.conversation] = (float("inf"), request.prompt_ids)
        self._sent[request.conversation] = (loads[best], prefill[best])
        return best

    def finished(self, response: Response, now: float) -> None:
        """Measure the replica's pace."""
        super().finished(response, now)
        conversation, replica = response.request.conversation, response.replica
        load, prefilled = self._sent.pop(conversation)
        prompt_ids = response.request.prompt_ids
        self._active[conversation] = (now, prompt_ids + response.completion_ids)
        if self._idea.reported:
            prefilled = prompt_ids - response.cached_ids
        work = self._work(response.completion_ids, prefilled)
        pace, old = response.seconds / (work * (load + 1)), self._paces[replica]
        self._paces[replica] = pace if old is None else _MEMORY * old + (1 - _MEMORY) * pace
        self._completion_ids += 0.05 * (response.completion_ids - self._completion_ids)

    def _work(self, completion_ids: float, prefill_ids: int) -> float:
        return completion_ids + prefill_ids / self._idea.weight

    def _measured_paces(self) -> list[float]:
        """The paces; a replica that was not measured yet counts as the fastest, so that it is."""
        fastest = min((pace for pace in self._paces if pace is not None), default=1.0)
        return [fastest if pace is None else pace for pace in self._paces]

    def _loads(self, now: float, without: int) -> list[float]:
        loads = [0.0] * len(self.in_flight)
        if self._idea.load == "requests":
            return [float(count) for count in self.in_flight]
        for conversation, (last, ids) in self._active.items():
            if conversation != without and now - last < _ACTIVE_S:
                share = 1.0 if self._idea.load == "conversations" else ids / 1000
                loads[self._home[conversation]] += share
        return loads


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


def _sticky(idea: Idea) -> Callable[[int], Chooser]:
    return lambda replicas: Sticky(replicas, idea)


CHOOSERS: dict[str, Callable[[int], Chooser]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "two_choices": TwoChoices,
    "router consistent_hash, sessions": ConsistentHash,
    "router consistent_hash, plain": partial(ConsistentHash, all_sessions=False),
    "router cache_aware, sessions": CacheAware,
    "router cache_aware, plain": partial(CacheAware, all_sessions=False),
    "router sticky_least_loaded, sessions": RouterSticky,
    "router sticky_least_loaded, plain": partial(RouterSticky, all_sessions=False),
    "sticky, requests": _sticky(Idea()),
    "sticky, conversations": _sticky(Idea("conversations")),
    "sticky, ids": _sticky(Idea("ids")),
    "sticky, requests, measured": _sticky(Idea(measured=True)),
    "sticky, conversations, measured": _sticky(Idea("conversations", measured=True)),
    "sticky, ids, measured": _sticky(Idea("ids", measured=True)),
    "sticky, requests, measured, move at 0.5": _sticky(Idea(measured=True, move=0.5)),
    "sticky, requests, measured, move at 0.7": _sticky(Idea(measured=True, move=0.7)),
    "sticky, requests, measured, move at 0.9": _sticky(Idea(measured=True, move=0.9)),
    "sticky, ids, measured, move at 0.7": _sticky(Idea("ids", measured=True, move=0.7)),
    "sticky, ..., move at 0.7, cached ids reported": _sticky(Idea(measured=True, move=0.7, reported=True)),
    "sticky, ..., move at 0.7, weight 4": _sticky(Idea(measured=True, move=0.7, weight=4)),
    "sticky, ..., move at 0.7, weight 64": _sticky(Idea(measured=True, move=0.7, weight=64)),
}
"""The policies that are compared, each made for a number of replicas."""
