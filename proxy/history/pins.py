"""Pins rollouts that a running request uses, so that no process evicts them meanwhile."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.history.store import Store, StoreError
from proxy.metrics import Metrics

log = logging.getLogger("tokenproxy")

LEASE_S = 60.0
"""Seconds for which a pin holds if its process dies."""
_RENEW_S = LEASE_S / 3


class Pins:
    """Pins rollouts in the store, and renews the pins of those that long requests use."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._running: Counter[str] = Counter()

    @contextmanager
    def hold(self, rollout: str) -> Iterator[None]:
        """Keep a rollout that was pinned with `pin` from eviction while the block runs."""
        self._running[rollout] += 1
        try:
            yield
        finally:
            self._running[rollout] -= 1
            if not self._running[rollout]:
                del self._running[rollout]

    async def pin(self, rollout: str) -> None:
        """Mark a rollout as used, and keep it for the next `LEASE_S` seconds.

        Raises:
            StoreError: the store does not respond.
        """
        await self._store.pin(rollout, time.time() + LEASE_S)

    async def renew_forever(self) -> None:
        """Renew the pins of rollouts in use, until cancelled."""
        while True:
            await asyncio.sleep(_RENEW_S)
            for rollout in list(self._running):
                try:
                    await self.pin(rollout)
                except StoreError as error:
                    self._metrics.store_errors.inc()
                    log.log(error.level, "a rollout in use could not be pinned: %s", error)
                    break
