"""Detects that this process was too busy to notice responses in time, so that a timeout proves nothing."""

import asyncio
import math
import time
from collections.abc import Callable

_TICK_S = 0.25
LATE_S = 1.0
"""A tick that is later than this makes recent timeouts inconclusive."""
_REMEMBERED_S = 10.0
_NAP_S = 0.05
_NAPS = 4
_SETTLES_S = 3.0


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

    async def settled(self) -> bool:
        """Wait, if the loop was late, until it is on time for some naps in a row; False if it stays late.

        What had arrived at the sockets before has been read then.
        """
        if not self.was_late:
            return True
        on_time, end = 0, self._clock() + _SETTLES_S
        while on_time < _NAPS:
            start = self._clock()
            if start > end:
                return False
            await asyncio.sleep(_NAP_S)
            on_time = on_time + 1 if self._clock() - start < 2 * _NAP_S else 0
        return True

    async def _watch(self) -> None:
        while True:
            self._due = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            if (now := self._clock()) - self._due > LATE_S:
                self._late_at = now
