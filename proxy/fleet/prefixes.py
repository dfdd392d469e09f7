"""Finds the replicas that hold the beginning of a prompt, for prompts without a recorded conversation.

A prompt is a compact JSON array, and one that extends another begins with the same bytes. So a digest of the
first 2^k bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenization.cache import BoundedCache

_SHORTEST = 10
"""Exponent of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""

_Holder = tuple[str, int]
"""A replica, and how often its cache had been cleared."""


@dataclass(slots=True)
class Prefixes:
    """The replicas that served each beginning of a prompt."""

    _holders: BoundedCache[bytes, tuple[_Holder, ...]] = field(
        default_factory=lambda: BoundedCache(_REMEMBERED)
    )
    _clearings: Counter[str] = field(default_factory=Counter)
    """How often the cache of each replica was cleared."""

    def find(self, prompt: bytes) -> tuple[tuple[str, ...], float]:
        """The replicas that hold the longest beginning of a prompt, the latest first, and its share."""
        holders: tuple[str, ...] = ()
        share = 0.0
        for size, digest in _beginnings(prompt):
            found = tuple(name for name, of in self._holders.get(digest) or () if of == self._clearings[name])
            if found:
                holders, share = found, size / len(prompt)
        return holders, share

    def forget(self, replica: str) -> None:
        """Take note that a replica holds no prompt any more: its cache was cleared."""
        self._clearings[replica] += 1

    def put(self, prompt: bytes, replica: str) -> None:
        """Take note that a replica served a prompt."""
        for _, digest in _beginnings(prompt):
            others = [other for other in self._holders.get(digest) or () if other[0] != replica]
            self._holders.put(digest, ((replica, self._clearings[replica]), *others[: _HOLDERS - 1]))


def _beginnings(prompt: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield size and digest of each beginning of a prompt, the shortest first."""
    hasher, done = hashlib.blake2b(digest_size=16, person=b"prefix"), 0
    for exponent in range(_SHORTEST, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield done, hasher.copy().digest()
