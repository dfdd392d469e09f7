"""Measures how late the event loop is: by how much a task that sleeps wakes up after its time."""

import asyncio

from proxy.metrics import Metrics

INTERVAL_S = 0.1
"""Seconds between two measurements. A block of the loop that is longer than this is always measured."""


async def measure_lag(metrics: Metrics) -> None:
    """Observe the lag until the task is cancelled."""
    now = asyncio.get_running_loop().time
    while True:
        due = now() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        metrics.event_loop_lag.observe(max(0.0, now() - due))
