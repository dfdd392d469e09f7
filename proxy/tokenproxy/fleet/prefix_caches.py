"""Which replica holds the beginning of a prompt in its prefix cache, by the turns that it served.

The conversation of a request names its replica; without one, the text of its prompt does. A prompt is a
compact JSON array, and one that extends another begins with the same bytes. So a digest of the first 2^k
bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chat_tokenizer.cache import BoundedCache
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.routing import Routing

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet

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

    def note(self, prompt: bytes, replica: Replica) -> None:
        """Take note that a replica holds a prompt in its cache."""
        if len(self._fleet.replicas) < 2:
            return
        for _, digest in _beginnings(prompt):
            served = dict(self._holders.get(digest) or {})
            served.pop(replica.name, None)
            latest = dict(list(served.items())[1 - _HOLDERS :])
            self._holders.put(digest, {**latest, replica.name: time.time()})

    def forget(self, replica: Replica) -> None:
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
