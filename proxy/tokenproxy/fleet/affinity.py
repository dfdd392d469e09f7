"""Which replica holds a conversation or a prompt: its active conversations, and its prefix cache.

Each process counts its own. A process that gets a conversation for the first time reads the replica that
holds its ids from the record of the last turn.

A request's conversation names the replica with its ids; without one, the text of its prompt does. A prompt
is a compact JSON array, and one that extends another begins with the same bytes. So a digest of the first 2^k
bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chat_tokenizer.cache import BoundedCache
from tokenproxy.fleet.admission import Context
from tokenproxy.fleet.choosing import Routing

if TYPE_CHECKING:
    from tokenproxy.fleet.replica import Replica

IDLE_S = 60.0
"""Seconds after its last request until a conversation that was not ended counts as over."""
_TIMES_LONGER = 4
"""How many times as long as the median pause between two turns an idle conversation keeps its room."""
_SHORTEST_S = 1.0
_FIRST_PAUSE_S = 5.0
"""How long conversations keep their room before any of the fleet had a second turn."""
_PAUSES = 255


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


_SHORTEST = 10
"""Exponent of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""


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
    for exponent in range(_SHORTEST, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield hasher.copy().digest()
