"""Detects that this process was too busy to notice responses in time, so that a timeout proves nothing."""

import asyncio
import math
import time
from collections.abc import Callable

_TICK_S = 0.25
LATE_S = 1.0
"""A tick that is later than this makes recent timeouts inconclusive."""
_REMEMBERED_S = 10.0


class Lateness:
    """Watches the event loop. One per fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._late_at = -math.inf
        self._due = 0.0

    def start(self) -> None:
        """Start watching. Call it inside a running event loop."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def was_late(self) -> bool:
        """Whether the loop is late now or was recently."""
        now = self._clock()
        running = self._task is not None
        return now - self._late_at < _REMEMBERED_S or (running and now - self._due > LATE_S)

    async def _watch(self) -> None:
        while True:
            self._due = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            if (now := self._clock()) - self._due > LATE_S:
                self._late_at = now
