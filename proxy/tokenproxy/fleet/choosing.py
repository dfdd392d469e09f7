"""Chooses the replica for a request: the one that holds its conversation or prompt, unless it is far busier.

How many requests run on each replica is compared: a slow replica keeps its requests for longer, so that it
gets fewer of them. Equally busy ones share the active conversations: those that wait for their tools, too.

Each process counts its own conversations. A process that gets one for the first time reads the replica that
holds its ids from the record of the last turn. A request's conversation names the replica with its ids;
without one, the text of its prompt does. A prompt is a compact JSON array, and one that extends another
begins with the same bytes. So a digest of the first 2^k bytes is kept for each k, with the replicas that
served them. The longest equal beginning decides.
"""

import hashlib
import math
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chat_tokenizer.cache import BoundedCache
from tokenproxy.fleet.admission import Context

if TYPE_CHECKING:
    from tokenproxy.fleet.replica import Replica

BYTES_PER_ID = 4
"""Approximate number of a request's bytes for each id, where the ids are not counted."""
_TIMES_BUSIER = 2
"""How many times as many requests as another replica, and four more, the replica of a conversation must run
before the conversation moves: the other replica has to read its whole history."""
_MORE_REQUESTS = 4
IDLE_S = 60.0
"""Seconds after its last request until a conversation that was not ended counts as over."""
_TIMES_LONGER = 4
"""How many times as long as the median pause between two turns an idle conversation keeps its room."""
_SHORTEST_S = 1.0
_FIRST_PAUSE_S = 5.0
"""How long conversations keep their room before any of the fleet had a second turn."""
_PAUSES = 255
_SHORTEST_EXPONENT = 10
"""Of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""

Choose = Callable[[Sequence["Replica"], str, Callable[[str], int]], "Replica"]
"""From replicas, the name of the conversation's holder, which may be empty, and the number of active
conversations by replica, to the chosen replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The facts of one request that decide where it runs, and whether it may run again."""

    conversation: str = ""
    """A key that is equal for all turns of the conversation; empty if the conversation cannot be told."""
    holder: str = ""
    """Name of the replica that holds the ids of its history; empty if none does."""
    prompts: Sequence[bytes] = ()
    """Its prompts that continue nothing recorded, as JSON arrays of ids."""
    ids: int = 0
    """Approximate number of ids in its prompt."""
    context_ids: int = 0
    """The same, or 0 if images make that unknown."""
    beginning: Sequence[bytes] = ()
    """Its prompt, of ids or of messages, as parts of JSON: those of others begin with the same bytes."""
    tenant: str = ""
    model: str = ""
    """The model that it names; empty if none."""
    repeatable: bool = True
    """Whether it may run again if no byte of a response was sent to the client."""
    samples: bool = True
    """Whether the engine's weights matter for it. Others are served while the fleet is paused, too."""
    completion: bool = False
    """Whether a successful response must be a chat completion."""
    goes_on: bool = False
    """Whether it goes on elsewhere if its engine breaks off after the beginning of the response."""
    digest: Callable[[], bytes] | None = None
    """Computes a digest that equal requests share; None for requests that cannot break an engine."""


def body_digest(path: str, body: bytes) -> bytes:
    """A digest of 16 bytes that equal requests share."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()


def sticky_least_loaded(
    replicas: Sequence["Replica"], holder: str, conversations: Callable[[str], int]
) -> "Replica":
    """The holder of the conversation, unless it is far busier than the least busy replica."""
    best = min(replicas, key=lambda each: (each.load.requests, conversations(each.name), random.random()))
    stay = next((each for each in replicas if each.name == holder), best)
    return best if stay.load.requests > _TIMES_BUSIER * best.load.requests + _MORE_REQUESTS else stay


@dataclass(slots=True)
class Active:
    """An active conversation."""

    replica: str
    context: Context
    used: float = 0.0
    running: int = 0
    waited_s: float = 0.0
    """How long it waited for room in a cache."""


@dataclass(slots=True)
class Conversations:
    """Active conversations, by a key that is equal for all turns of a conversation."""

    idle_s: float = IDLE_S
    clock: Callable[[], float] = time.monotonic
    _active: OrderedDict[str, Active] = field(default_factory=OrderedDict)
    """The one used least recently first."""
    _counts: Counter[str] = field(default_factory=Counter)
    """How many are on each replica."""
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_PAUSES))
    """Seconds between two turns of a conversation, the latest last; infinite where no other turn followed."""
    _first_finish: float = math.inf

    def find(self, key: str) -> Active | None:
        """A conversation; None if it is not active."""
        return self._active.get(key)

    def holder(self, key: str) -> str:
        """The replica that got the last request of a conversation; empty if it is not active."""
        active = self._active.get(key)
        return active.replica if active is not None else ""

    def begin(self, routing: Routing, replica: "Replica", context: Context | None = None) -> None:
        """Count a request of a conversation that is sent to a replica, whose cache gives it room.

        Args:
            context: that of a conversation which is not active.
        """
        self._expire()
        key = routing.conversation
        active = self._active.get(key)
        if active is None:
            active = self._active[key] = Active(replica.name, context or Context())
            self._counts[replica.name] += 1
        else:
            if routing.completion:
                self._note_pause(active)
            if active.replica != replica.name:
                self._counts.update({active.replica: -1, replica.name: 1})
                active.replica = replica.name
        if routing.completion:
            replica.cache.hold(active.context, routing.context_ids)
        active.running += 1
        self._use(key, active)

    @contextmanager
    def waiting(self, key: str) -> Iterator[None]:
        """Let a request of a conversation wait for room: that is no pause, and counts for the bound."""
        active, began = self._active.get(key), self.clock()
        if active is not None:
            self._note_pause(active)
            active.running += 1
        try:
            yield
        finally:
            if active is not None and self._active.get(key) is active:
                self.finish(key)
            if (active := self._active.get(key)) is not None:
                active.waited_s += self.clock() - began

    def finish(self, key: str) -> None:
        """Count a request of a conversation as complete."""
        if (active := self._active.get(key)) is not None:
            active.running = max(0, active.running - 1)
            self._use(key, active)
            self._first_finish = min(self._first_finish, active.used)
            if active.context.cache is not None and not active.running:
                active.context.cache.pause(active.context, active.used)

    def measure(self, key: str, prompt_ids: int, sampled: int) -> None:
        """Take note of how many ids a turn has: its prompt's, and those that were sampled."""
        if (active := self._active.get(key)) is not None:
            active.context.measure(prompt_ids, sampled)

    def end(self, key: str) -> bool:
        """Remove a conversation, because no request follows. False if it was not active."""
        active = self._active.pop(key, None)
        if active is not None:
            self._counts[active.replica] -= 1
            if active.context.cache is not None:
                active.context.cache.remove(active.context)
        return active is not None

    def idle_before(self) -> float:
        """Since when at the latest a conversation is idle that loses its room to one that waits.

        If no turn follows most turns, that is now: what was sampled once is not needed again.
        """
        if not self._pauses:
            waits = self.clock() < self._first_finish + _FIRST_PAUSE_S
            return -math.inf if waits else self.clock()
        usual_s = sorted(self._pauses)[len(self._pauses) // 2]
        return self.clock() - (max(_SHORTEST_S, _TIMES_LONGER * usual_s) if usual_s < math.inf else 0.0)

    def _note_pause(self, active: Active) -> None:
        if not active.running:
            self._pauses.append(self.clock() - active.used)

    def count(self, replica: str) -> int:
        """Number of active conversations on a replica."""
        self._expire()
        return self._counts[replica]

    def _expire(self) -> None:
        now = self.clock()
        while self._active:
            key, active = next(iter(self._active.items()))
            if active.used >= now - self.idle_s:
                return
            if active.running:
                self._use(key, active)
            else:
                self._pauses.append(math.inf)
                self.end(key)

    def _use(self, key: str, active: Active) -> None:
        active.used = self.clock()
        self._active.move_to_end(key)


class PrefixCaches:
    """The replicas that served the beginnings of prompts."""

    def __init__(self) -> None:
        self._holders: BoundedCache[bytes, tuple[str, ...]] = BoundedCache(_REMEMBERED)
        """The replicas that served each beginning, the latest last."""

    def find(self, prompt: bytes) -> tuple[str, ...]:
        """The replicas that served the longest known beginning of a prompt."""
        found = [self._holders.get(digest) or () for digest in _beginnings(prompt)]
        return next((holders for holders in reversed(found) if holders), ())

    def note(self, prompt: bytes, replica: str) -> None:
        """Take note that a replica served a prompt."""
        for digest in _beginnings(prompt):
            others = [each for each in self._holders.get(digest) or () if each != replica]
            self._holders.put(digest, (*others[1 - _HOLDERS :], replica))


def _beginnings(prompt: bytes) -> Iterator[bytes]:
    """Yield a digest of each beginning of a prompt, the shortest first."""
    hasher, done = hashlib.blake2b(digest_size=16, person=b"prefix"), 0
    for exponent in range(_SHORTEST_EXPONENT, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield hasher.copy().digest()
