"""Counts connections that broke under requests, to tell which request may have ended the engine."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_TOGETHER_S = 2.0
"""Connections that break within so many seconds broke together."""


@dataclass(slots=True)
class Breaks:
    """The last break of one replica."""

    clock: Callable[[], float] = time.monotonic
    at: float = -math.inf
    """When its first connection broke; tells breaks apart."""
    requests: int = 0
    """Number of requests that ran then."""

    def note(self, running: int) -> None:
        """A connection broke under a request that is one of `running`."""
        now = self.clock()
        if now - self.at > _TOGETHER_S:
            self.at, self.requests = now, 0
        self.requests = max(self.requests, running)

    def survived(self) -> None:
        """The engine still responds: the next connection that breaks belongs to another break."""
        self.at = -math.inf

    @property
    def alone(self) -> bool:
        """Whether one request ran."""
        return self.requests == 1
