"""Tasks in the background: one that does the same again and again, and the end of several."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("tokenproxy")


async def repeat(step: Callable[[], Awaitable[None]], problem: str) -> None:
    """Run a step, which begins with a wait, again and again. Its errors do not end that.

    Args:
        problem: logged with an error.
    """
    while True:
        try:
            await step()
        except Exception:  # the boundary of the task: nothing would start it again
            log.exception("%s", problem)


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
