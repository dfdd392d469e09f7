"""What one request holds of the record: turns that no other request continues, rollouts that are not evicted.

All of it ends with the request: a claimed turn is open again unless a turn was recorded in its place, and a
rollout is no longer pinned. What must outlive the request runs in `Tasks`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tokenproxy.base.tasks import repeat
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Store, StoreError

LEASE_S = 60.0
"""Seconds for which a pin holds if its process dies."""
_RENEW_S = LEASE_S / 3
CLOSE_TIMEOUT_S = 10.0
"""Seconds that closing waits for running recordings."""


class Pins:
    """Pins rollouts in the store, and renews the pins of those that requests hold. One per application."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.store = store
        self.metrics = metrics
        self.held: Counter[str] = Counter()
        """Number of running requests by rollout."""
        self._pinned: dict[str, float] = {}
        """When rollouts were pinned, of those pinned lately. Time of `time.monotonic`."""

    async def pin(self, rollout: str) -> bool:
        """Mark a rollout as used, and keep it for some time; False if the store fails.

        A rollout pinned less than `_RENEW_S` ago is not pinned again: the pin outlives the next renewal.
        """
        now = time.monotonic()
        if self._pinned.get(rollout, -LEASE_S) > now - _RENEW_S:
            return True
        try:
            if await self.store.pin(rollout, time.time() + LEASE_S):
                self._pinned[rollout] = now
        except StoreError as error:
            # ids are exact without the pin; an eviction would leave a new turn without its parent
            error.report(self.metrics, "a rollout in use is not kept from eviction")
            return False
        return True

    async def renew(self) -> None:
        """Renew the pins of rollouts in use, after a while."""
        await asyncio.sleep(_RENEW_S)
        recent = time.monotonic() - _RENEW_S
        self._pinned = {rollout: at for rollout, at in self._pinned.items() if at > recent}
        for rollout in list(self.held):
            if not await self.pin(rollout):
                break


class Claims:
    """The turns that a request claimed and the rollouts that it uses, until the end of the block."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._claimed: set[str] = set()
        """Turns to be released."""
        self._rollouts: set[str] = set()

    async def __aenter__(self) -> "Claims":
        return self

    async def __aexit__(self, *exception: object) -> None:
        held = self._pins.held
        for rollout in self._rollouts:
            held[rollout] -= 1
            if not held[rollout]:
                del held[rollout]
        for turn in self._claimed:
            try:
                await self._pins.store.release(turn)
            except StoreError as error:
                error.report(self._pins.metrics, "a turn that was claimed in vain may stay claimed")

    async def take(self, key: bytes, ids: bytes) -> str | None:
        """Claim a turn of those with equal ids under a key; None if none is open. Raises StoreError."""
        turn = await self._pins.store.claim(key, ids)
        if turn is not None:
            self._claimed.add(turn)
        return turn

    def keep(self, turn: str) -> None:
        """Leave a turn claimed after the block, because one that continues it was recorded."""
        self._claimed.discard(turn)

    def hold(self, rollout: str) -> None:
        """Renew the pin of a rollout until the end of the block."""
        if rollout not in self._rollouts:
            self._rollouts.add(rollout)
            self._pins.held[rollout] += 1

    async def pin(self, rollout: str) -> bool:
        """Keep a rollout from eviction until the end of the block; False if the store does not respond."""
        self.hold(rollout)
        return await self._pins.pin(rollout)


class Tasks:
    """Holds two kinds of tasks: those that must be finished, and those that run until they are cancelled."""

    def __init__(self, metrics: Metrics, retry_s: float = 1.0) -> None:
        """`retry_s`: from a step of `run_forever` that failed to the next."""
        self._metrics = metrics
        self._retry_s = retry_s
        self._finishing: set[asyncio.Task[None]] = set()
        self._forever: set[asyncio.Task[None]] = set()

    def run_forever(self, step: Callable[[], Coroutine[Any, Any, None]], consequence: str) -> None:
        """Run a step, which waits by itself, again and again until `aclose`. Its errors do not end that.

        Args:
            consequence: of an error, for the log.
        """

        async def reported() -> None:
            try:
                await step()
            except StoreError as error:
                error.report(self._metrics, consequence)
                await asyncio.sleep(self._retry_s)

        self._forever.add(asyncio.create_task(repeat(reported, consequence, self._retry_s)))

    def finish(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        """Run work to its end, even if the caller does not wait for it, or is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for the work that must be finished and is running."""
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        """Cancel the tasks that run forever, and wait for the others."""
        for task in self._forever:
            task.cancel()
        if waiting := {*self._finishing, *self._forever}:
            await asyncio.wait(waiting, timeout=CLOSE_TIMEOUT_S)
