"""What each process does for the feed in the background: finish idle rollouts, report its consumers."""

import asyncio
import logging
import time

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.consumers import consumers
from tokenproxy.record.store import Store, StoreError

log = logging.getLogger("tokenproxy")

LONGEST_INTERVAL_S = 30.0
"""Seconds between two searches for idle rollouts, unless a quarter of `finish_after_s` is less."""
STEP = 128
"""Rollouts that one call of the store finishes: turns are recorded in between."""
PAUSE_S = 0.05
"""Seconds between two such calls."""
REPORT_S = 10.0
"""Seconds between two reports of the consumers."""
MOST_REPORTED = 200
"""Names of consumers that the metrics show."""


async def finish_idle_forever(store: Store, metrics: Metrics, after_s: float) -> None:
    """Finish the rollouts that were not used for `after_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(min(LONGEST_INTERVAL_S, after_s / 4))
        try:
            await _finish_idle(store, time.time() - after_s)
        except StoreError as error:
            metrics.store_errors.inc()
            log.log(error.level, "idle rollouts could not be finished: %s", error)


async def _finish_idle(store: Store, before: float) -> None:
    while True:
        if await store.finish_idle(before, STEP) < STEP:
            return
        await asyncio.sleep(PAUSE_S)


async def report_consumers_forever(store: Store, metrics: Metrics) -> None:
    """Keep the metrics of the feed's consumers up to date, until cancelled."""
    reported: set[str] = set()
    while True:
        try:
            reported = await _report_consumers(store, metrics, reported)
        except StoreError as error:
            log.log(error.level, "the consumers of the feed cannot be read: %s", error)
        await asyncio.sleep(REPORT_S)


async def _report_consumers(store: Store, metrics: Metrics, before: set[str]) -> set[str]:
    """Report the consumers of all tenants by their names, and remove those that are gone.

    Tenants are not told apart: the page of metrics may be open to everybody, and a tenant is the digest of a
    key. Of a name that several tenants use, the rollouts are added up, and the oldest counts.
    """
    now = time.time()
    waiting: dict[str, int] = {}
    oldest_s: dict[str, float] = {}
    for consumer in await consumers(store):
        if len(waiting) == MOST_REPORTED and consumer.name not in waiting:
            continue
        waiting[consumer.name] = waiting.get(consumer.name, 0) + consumer.waiting
        age = max(0.0, now - consumer.oldest / 1e6) if consumer.waiting else 0.0
        oldest_s[consumer.name] = max(oldest_s.get(consumer.name, 0.0), age)
    for name, count in waiting.items():
        metrics.consumer_lag(name, count, oldest_s[name])
    for name in before - waiting.keys():
        metrics.consumer_removed(name)
    return set(waiting)
