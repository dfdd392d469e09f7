"""Finds the replicas that hold the beginning of a prompt, for prompts without a recorded conversation.

A prompt is a compact JSON array, and one that extends another begins with the same bytes. So a digest of the
first 2^k bytes is kept for each k, with the replicas that served them. The longest equal beginning decides.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenization.cache import BoundedCache

_SHORTEST = 10
"""Exponent of the shortest beginning: 1 KiB, some 170 ids."""
_REMEMBERED = 65_536
_HOLDERS = 8
"""Replicas that are remembered for one beginning: many conversations may share a system prompt."""


@dataclass(slots=True)
class Prefixes:
    """The replicas that served each beginning of a prompt."""

    _holders: BoundedCache[bytes, tuple[str, ...]] = field(default_factory=lambda: BoundedCache(_REMEMBERED))

    def find(self, prompt: bytes) -> tuple[tuple[str, ...], float]:
        """The replicas that hold the longest beginning of a prompt, the latest first, and its share."""
        holders: tuple[str, ...] = ()
        share = 0.0
        for size, digest in _beginnings(prompt):
            if (found := self._holders.get(digest)) is not None:
                holders, share = found, size / len(prompt)
        return holders, share

    def put(self, prompt: bytes, replica: str) -> None:
        """Take note that a replica served a prompt."""
        for _, digest in _beginnings(prompt):
            others = [other for other in self._holders.get(digest) or () if other != replica]
            self._holders.put(digest, (replica, *others[: _HOLDERS - 1]))


def _beginnings(prompt: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield size and digest of each beginning of a prompt, the shortest first."""
    hasher, done = hashlib.blake2b(digest_size=16, person=b"prefix"), 0
    for exponent in range(_SHORTEST, len(prompt).bit_length()):
        hasher.update(prompt[done : 1 << exponent])
        done = 1 << exponent
        yield done, hasher.copy().digest()
