"""Which replica holds a conversation or a prompt: its active conversations, and its prefix cache.

Each process counts its own. A process that gets a conversation for the first time reads the replica that
holds its ids from the record of the last turn.

A conversation between two turns counts less than one whose turn runs, because it may be over: its weight is
the share of requests that continue a conversation, of late. Agents come back; single requests do not. One
that has paused for far longer than others of late does not count at all.

A request's conversation names the replica with its ids; without one, the text of its prompt does. A prompt
is a compact JSON array, and one that extends another begins with the same bytes. So a digest of the first 2^k
bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chat_tokenizer.cache import BoundedCache
from tokenproxy.fleet.choosing import Routing

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet
    from tokenproxy.fleet.replica import Replica

IDLE_S = 60.0
"""Seconds after its last request until a conversation that was not ended counts as over."""
_PAUSES = 8.0
"""Mean pauses between two turns after which a conversation no longer counts."""
_SHORTEST_PAUSE_S = 1.0
_STEP = 0.02
"""Share of the error by which the share of requests that continue a conversation is corrected."""


@dataclass(slots=True)
class _Active:
    replica: str
    ids: int
    used: float
    running: int = 0
    cached: bool = True
    """Whether the replica may have its ids in its prefix cache."""


@dataclass(slots=True)
class _Sums:
    """Of the conversations on one replica."""

    count: int = 0
    ids: int = 0
    idle_count: int = 0
    """Those without a turn that runs."""
    idle_ids: int = 0


@dataclass(slots=True)
class Conversations:
    """Active conversations, by a key that is equal for all turns of a conversation."""

    idle_s: float = IDLE_S
    clock: Callable[[], float] = time.monotonic
    _active: OrderedDict[str, _Active] = field(default_factory=OrderedDict)
    """Those that count, the one used least recently first."""
    _quiet: OrderedDict[str, _Active] = field(default_factory=OrderedDict)
    """Those that no longer count and may come back, the one used least recently first."""
    _pause_s: float | None = None
    """Mean time between two turns of a conversation, of late; None before the first."""
    _sums: defaultdict[str, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    _total: int = 0
    """The ids of all."""
    _continuing: float = 1.0
    """Share of requests that continue a conversation, of late."""

    def __len__(self) -> int:
        """Number of active conversations."""
        return len(self._active)

    def holder(self, key: str) -> str:
        """The replica that may have the ids of a conversation in its cache; empty if it is not active."""
        active = self._active.get(key) or self._quiet.get(key)
        return active.replica if active is not None and active.cached else ""

    def forget_caches(self, replica: str) -> None:
        """Take note that a replica holds the ids of no conversation but of those that run on it."""
        for active in (*self._active.values(), *self._quiet.values()):
            if active.replica == replica and not active.running:
                active.cached = False

    def begin(self, key: str, replica: str, ids: int) -> None:
        """Count a request of a conversation that is sent to a replica, with a prompt of about `ids` ids."""
        now, active = self.clock(), self._take(key) or self._quiet.pop(key, None)
        if active is not None and not active.running:
            pause_s = now - active.used
            self._pause_s = pause_s if self._pause_s is None else self._pause_s
            self._pause_s += _STEP * (pause_s - self._pause_s)
        self._continuing += _STEP * ((active is not None) - self._continuing)
        self._put(key, _Active(replica, ids, now, 1 + (active.running if active is not None else 0)))

    def finish(self, key: str) -> None:
        """Count a request of a conversation as complete."""
        if (active := self._take(key)) is not None:
            active.running, active.used = max(0, active.running - 1), self.clock()
            self._put(key, active)

    def end(self, key: str) -> bool:
        """Remove a conversation, because no request follows. False if it was not active."""
        return (self._take(key) or self._quiet.pop(key, None)) is not None

    def load(self, replica: str, without: str = "") -> float:
        """Number of active conversations on a replica, each weighted by its ids.

        A conversation of average length counts 1.

        Args:
            without: the key of a conversation to leave out.
        """
        self._expire()
        if replica not in self._sums:
            return 0.0
        sums, over = self._sums[replica], 1 - self._continuing
        count, ids = sums.count - over * sums.idle_count, sums.ids - over * sums.idle_ids
        own = self._active.get(without)
        if own is not None and own.replica == replica:
            weight = 1.0 if own.running else self._continuing
            count, ids = count - weight, ids - weight * own.ids
        return max(0.0, ids * len(self._active) / self._total if self._total else count)

    def count(self, replica: str) -> int:
        """Number of active conversations on a replica."""
        self._expire()
        return self._sums[replica].count if replica in self._sums else 0

    def _expire(self) -> None:
        now = self.clock()
        pause_s = self.idle_s if self._pause_s is None else _PAUSES * self._pause_s
        counts_s = min(self.idle_s, max(_SHORTEST_PAUSE_S, pause_s))
        while self._active:
            key, active = next(iter(self._active.items()))
            if active.used >= now - counts_s:
                break
            self._take(key)
            if active.running:
                active.used = now
                self._put(key, active)
            else:
                self._quiet[key] = active
        while self._quiet and next(iter(self._quiet.values())).used < now - self.idle_s:
            self._quiet.popitem(last=False)

    def _put(self, key: str, active: _Active) -> None:
        self._active[key] = active
        self._add(active, 1)

    def _take(self, key: str) -> _Active | None:
        active = self._active.pop(key, None)
        if active is not None:
            self._add(active, -1)
        return active

    def _add(self, active: _Active, times: int) -> None:
        sums = self._sums[active.replica]
        sums.count += times
        sums.ids += times * active.ids
        self._total += times * active.ids
        if not active.running:
            sums.idle_count += times
            sums.idle_ids += times * active.ids
        if not sums.count:
            del self._sums[active.replica]


_SHORTEST = 10
"""Exponent of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""


class PrefixCaches:
    """The prefix caches of one fleet."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._holders: BoundedCache[bytes, dict[str, float]] = BoundedCache(_REMEMBERED)
        """The replicas that served each beginning, and when, in seconds since the epoch; the latest last."""
        self._cleared_at: dict[str, float] = {}
        """When the cache of a replica was last cleared, by its name."""

    def holder(self, routing: Routing) -> str:
        """Name of the replica that holds the history of a request; empty if there is none."""
        active = self._fleet.conversations.holder(routing.conversation)
        if active or routing.held_since >= self._cleared_at.get(routing.holder, 0.0):
            return active or routing.holder
        return ""

    def holder_of_prompt(self, prompt: bytes) -> tuple[str, float]:
        """The least loaded replica with the longest beginning of a prompt, and its share of the prompt."""
        fleet = self._fleet
        if len(fleet.replicas) < 2:
            return "", 0.0
        holders, share = self.find(prompt)
        usable = [each.name for each in fleet.taking() if each.name in holders]
        return min(usable, key=fleet.conversations.load, default=""), share

    def find(self, prompt: bytes) -> tuple[list[str], float]:
        """The replicas that hold the longest beginning of a prompt, and its share of the prompt."""
        holders: list[str] = []
        share = 0.0
        for size, digest in _beginnings(prompt):
            served = self._holders.get(digest) or {}
            if found := [name for name, at in served.items() if at > self._cleared_at.get(name, 0.0)]:
                holders, share = found, size / len(prompt)
        return holders, share

    def note(self, prompt: bytes, replica: "Replica") -> None:
        """Take note that a replica holds a prompt in its cache."""
        if len(self._fleet.replicas) < 2:
            return
        for _, digest in _beginnings(prompt):
            served = dict(self._holders.get(digest) or {})
            served.pop(replica.name, None)
            latest = dict(list(served.items())[1 - _HOLDERS :])
            self._holders.put(digest, {**latest, replica.name: time.time()})

    def forget(self, replica: "Replica") -> None:
        """Take note that the cache of a replica was cleared."""
        self._cleared_at[replica.name] = time.time()
        self._fleet.conversations.forget_caches(replica.name)


def _beginnings(prompt: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield size and digest of each beginning of a prompt, the shortest first."""
    hasher, done = hashlib.blake2b(digest_size=16, person=b"prefix"), 0
    for exponent in range(_SHORTEST, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield done, hasher.copy().digest()
