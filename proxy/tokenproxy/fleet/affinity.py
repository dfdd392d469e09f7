"""Which replica holds a conversation or a prompt: its active conversations, and its prefix cache.

Each process counts its own. A process that gets a conversation for the first time reads the replica that
holds its ids from the record of the last turn.

A request's conversation names the replica with its ids; without one, the text of its prompt does. A prompt
is a compact JSON array, and one that extends another begins with the same bytes. So a digest of the first 2^k
bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chat_tokenizer.cache import BoundedCache

IDLE_S = 60.0
"""Seconds after its last request until a conversation that was not ended counts as over."""


@dataclass(slots=True)
class _Active:
    replica: str
    used: float = 0.0
    running: int = 0


@dataclass(slots=True)
class Conversations:
    """Active conversations, by a key that is equal for all turns of a conversation."""

    idle_s: float = IDLE_S
    clock: Callable[[], float] = time.monotonic
    _active: OrderedDict[str, _Active] = field(default_factory=OrderedDict)
    """The one used least recently first."""
    _counts: Counter[str] = field(default_factory=Counter)
    """How many are on each replica."""

    def holder(self, key: str) -> str:
        """The replica that got the last request of a conversation; empty if it is not active."""
        active = self._active.get(key)
        return active.replica if active is not None else ""

    def begin(self, key: str, replica: str) -> None:
        """Count a request of a conversation that is sent to a replica."""
        self._expire()
        active = self._active.get(key)
        if active is None:
            active = self._active[key] = _Active(replica)
            self._counts[replica] += 1
        elif active.replica != replica:
            self._counts.update({active.replica: -1, replica: 1})
            active.replica = replica
        active.running += 1
        self._use(key, active)

    def finish(self, key: str) -> None:
        """Count a request of a conversation as complete."""
        if (active := self._active.get(key)) is not None:
            active.running = max(0, active.running - 1)
            self._use(key, active)

    def end(self, key: str) -> bool:
        """Remove a conversation, because no request follows. False if it was not active."""
        active = self._active.pop(key, None)
        if active is not None:
            self._counts[active.replica] -= 1
        return active is not None

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
                self.end(key)

    def _use(self, key: str, active: _Active) -> None:
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
