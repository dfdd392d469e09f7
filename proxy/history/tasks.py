"""Work that outlives the request it was begun for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for what is being recorded."""


class Tasks:
    """Tasks that are held until they are done, in two kinds: what must be finished, and what runs forever."""

    def __init__(self) -> None:
        self._finishing: set[asyncio.Task[None]] = set()
        self._forever: set[asyncio.Task[None]] = set()

    def run_forever(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something until `aclose`, which cancels it."""
        self._hold(self._forever, work)

    def finish_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for but `aclose`."""
        self._hold(self._finishing, work)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something to its end, even if whoever waits for it is cancelled meanwhile."""
        await asyncio.shield(self._hold(self._finishing, work))

    async def aclose(self) -> None:
        """Cancel what runs forever and wait for the rest."""
        for task in self._forever:
            task.cancel()
        if waiting := {*self._finishing, *self._forever}:
            await asyncio.wait(waiting, timeout=CLOSE_TIMEOUT_S)

    def _hold(
        self, tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task
