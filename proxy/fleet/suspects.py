"""Requests under which engines died: one that kills engines must not kill the whole fleet.

Nothing tells which of the requests that ran on an engine ended it, or whether one of them did. One that
ran alone is the suspect; of several each may run once more, and one that sees a second engine die is the
suspect then. A suspect is refused for a while, also where its client sends it again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

REFUSED_S = 60.0
"""How long an equal request is refused."""
_REMEMBERED = 4096


@dataclass(slots=True)
class _Deaths:
    count: int
    at: float
    last: object
    """The latest of them."""


@dataclass(slots=True)
class Suspects:
    """Digests of requests under which engines died."""

    clock: Callable[[], float] = time.monotonic
    _deaths: OrderedDict[bytes, _Deaths] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._deaths)

    def engine_died(self, digest: bytes, death: object, *, alone: bool) -> bool:
        """An engine died under a request; returns whether the request may run once more.

        Args:
            death: which death it was: equal requests that ran on the engine at once see it only once.
        """
        now = self.clock()
        earlier = self._deaths.pop(digest, None)
        before = earlier.count if earlier is not None and now - earlier.at < REFUSED_S else 0
        seen = earlier is not None and earlier.last == death
        self._deaths[digest] = _Deaths(before + (0 if seen else 2 if alone else 1), now, death)
        while len(self._deaths) > _REMEMBERED:
            self._deaths.popitem(last=False)
        return self._deaths[digest].count < 2

    def refuses(self, digest: bytes) -> bool:
        """Whether an equal request ended an engine a short while ago."""
        oldest = self.clock() - REFUSED_S
        while self._deaths and next(iter(self._deaths.values())).at <= oldest:
            self._deaths.popitem(last=False)
        deaths = self._deaths.get(digest)
        return deaths is not None and deaths.count >= 2
