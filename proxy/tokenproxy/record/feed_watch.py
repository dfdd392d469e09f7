"""Wakes the requests that wait for the feed to grow.

All of them share one poll of the store, which other processes write too. What this process finishes itself
wakes them at once.
"""

import asyncio
import logging
from contextlib import suppress

from tokenproxy.record.store import Store, StoreError

log = logging.getLogger("tokenproxy")

POLL_S = 0.2
"""Seconds from one poll to the next while somebody waits, beyond `SHORTEST_S`."""
SHORTEST_S = 0.02
"""Seconds between two polls if rollouts are finished all the time: each wakes all who wait."""


class FeedWatch:
    """Polls the end of the feed, as long as somebody waits. One per application."""

    def __init__(self, store: Store, poll_s: float = POLL_S) -> None:
        self._store = store
        self._poll_s = poll_s
        self._waiters: dict[asyncio.Future[None], int] = {}
        """Each with the end of the feed that its request has seen."""
        self._needed = asyncio.Event()
        """Set while somebody waits."""
        self._now = asyncio.Event()
        """Set to poll without waiting for `POLL_S`."""

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the end of the feed is another one than `seen`; False if that takes too long."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[woken] = seen
        self._needed.set()
        try:
            done, _ = await asyncio.wait({woken}, timeout=seconds)
            return bool(done)
        finally:
            del self._waiters[woken]

    def notify(self) -> None:
        """Poll at once: this process may have finished a rollout."""
        self._now.set()

    async def poll_forever(self) -> None:
        """Poll until cancelled."""
        while True:
            await self._needed.wait()
            try:
                end = (await self._store.feed_state()).end
            except StoreError as error:
                # those who wait are woken when the store responds again, or get the error when they read next
                log.log(error.level, "the feed cannot be watched: %s", error)
            else:
                self._wake(end)
            if not self._waiters:
                self._needed.clear()
                continue
            await asyncio.sleep(SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._now.wait()
            self._now.clear()

    def _wake(self, end: int) -> None:
        for woken, seen in self._waiters.items():
            if seen != end and not woken.done():
                woken.set_result(None)
