"""Measures how late the event loop is: by how much a task that sleeps wakes up after its time."""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.metrics import Metrics

INTERVAL_S = 0.1
"""Seconds between two measurements. A block of the loop that is longer than this is always measured."""


async def measure_lag(
    metrics: Metrics,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Observe the lag until the task is cancelled. `clock` is the event loop's if it is None."""
    now = clock or asyncio.get_running_loop().time
    while True:
        due = now() + INTERVAL_S
        await sleep(INTERVAL_S)
        metrics.event_loop_lag.observe(max(0.0, now() - due))
