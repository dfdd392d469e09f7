"""Tasks in the background: one that does the same again and again, and the end of several."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("tokenproxy")


async def repeat(step: Callable[[], Awaitable[None]], problem: str, retry_s: float = 0.0) -> None:
    """Run a step, which waits by itself, again and again. Its errors do not end that.

    Args:
        problem: logged with an error, once if it repeats.
        retry_s: from a step that failed to the next.
    """
    logged = ""
    while True:
        try:
            await step()
            logged = ""
        except Exception as error:  # the boundary of the task: nothing would start it again
            if logged != repr(error):
                log.exception("%s", problem)
            logged = repr(error)
            await asyncio.sleep(retry_s)


async def end_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
