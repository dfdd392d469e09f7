"""Tasks that outlive the request that started them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

CLOSE_TIMEOUT_S = 10.0
"""Seconds that closing waits for running recordings."""


class Tasks:
    """Holds two kinds of tasks: those that must be finished, and those that run until they are cancelled."""

    def __init__(self) -> None:
        self._finishing: set[asyncio.Task[None]] = set()
        self._forever: set[asyncio.Task[None]] = set()

    def run_forever(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work until `aclose`, which cancels it."""
        self._hold(self._forever, work)

    def finish_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background; only `aclose` waits for it."""
        self._hold(self._finishing, work)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work to its end, even if the caller is cancelled meanwhile."""
        await asyncio.shield(self._hold(self._finishing, work))

    async def aclose(self) -> None:
        """Cancel the tasks that run forever, and wait for the others."""
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
