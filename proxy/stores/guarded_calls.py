"""Calls of a store that may stall, fail, or be missing at first: which are made, skipped, or repeated later.

- A call takes no longer than what its request has left of its time: see `proxy.history.store_time`.
- After three failures in a row calls are skipped. Reads and writes count apart: a SQLite file that another
  process locks can still be read. Trials in the background find out when the store works again; no request
  waits for one.
- A turn that the store does not take in time waits, and is recorded before any other of its rollout.
- What is lost, because too much waits or the process ends, is logged and counted.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, TypeVarTuple

from proxy.history.store import (
    Evicted,
    RecordRefused,
    Store,
    StoreError,
    StoreSkipped,
    StoreStalled,
    StoreUnusable,
)
from proxy.history.store_time import BACKGROUND_S, spending, within
from proxy.metrics import Metrics
from proxy.stores.breaker import FIRST_WAIT_S, LONGEST_WAIT_S, Backoff, Breaker
from proxy.stores.health import StoreHealth
from proxy.stores.waiting import MOST_BYTES, MOST_TURNS, Waiting, WaitingTurns

log = logging.getLogger("tokenproxy")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 3.0
"""How long the start of the proxy waits for the store, if it can do without."""
CLOSE_S = 5.0
"""How long its end waits for turns to be recorded, and then for the store to close."""
_PROBE = bytes(16)
"""A key under which nothing is."""


@dataclass(frozen=True)
class GuardLimits:
    """How long a guarded store waits, in seconds, and how many turns it holds until they are recorded."""

    start_s: float = START_S
    close_s: float = CLOSE_S
    first_wait_s: float = FIRST_WAIT_S
    """From the first trial that fails to the second."""
    longest_wait_s: float = LONGEST_WAIT_S
    most_turns: int = MOST_TURNS
    most_bytes: int = MOST_BYTES


class GuardedCalls:
    """Makes the calls of one store. `open` comes first."""

    def __init__(self, store: Store, metrics: Metrics, *, required: bool, limits: GuardLimits) -> None:
        """`required`: whether `open` fails if the store does not respond."""
        self.waiting = WaitingTurns(limits.most_turns, limits.most_bytes)
        """The turns that the store did not take yet."""
        self._store = store
        self._metrics = metrics
        self._required = required
        self._limits = limits
        self._reads, self._writes = Breaker(), Breaker()
        self._opening: asyncio.Future[None] | None = None
        self._is_open = False
        self._backoff = Backoff(limits.first_wait_s, limits.longest_wait_s)
        self._recovery: asyncio.Task[None] | None = None
        """Runs while something is wrong."""
        self._since = 0.0
        self._error: StoreError | None = None
        self._lost = 0

    def health(self) -> StoreHealth:
        """How the store does now."""
        state: Literal["ok", "stalled", "unavailable"] = "ok"
        if self._recovery is not None:
            state = "stalled" if isinstance(self._error, StoreStalled) else "unavailable"
        ill = state != "ok"
        return StoreHealth(
            state=state,
            since=self._since if ill else None,
            error=str(self._error) if ill and self._error else None,
            queued_turns=len(self.waiting),
            lost_turns=self._lost,
        )

    async def open(self) -> None:
        """Open the store. One that does not respond is tried again later, unless it is required.

        Raises:
            StoreError: it is required, or can never be used.
        """
        self._opening = asyncio.ensure_future(self._store.open())
        start_s = self._limits.start_s
        try:
            await asyncio.wait({self._opening}, timeout=None if self._required else start_s)
            if not self._opening.done():
                raise StoreStalled(f"the store did not open within {start_s:g} s")
            self._opening.result()
        except StoreError as error:
            if self._required or isinstance(error, StoreUnusable):
                raise
            self._recover_from(error)
        except asyncio.CancelledError:
            self._opening.cancel()
            raise
        else:
            self._is_open = True

    async def aclose(self) -> None:
        """Close the store. Turns that cannot be recorded in time are lost."""
        recovery = self._recovery
        if recovery is not None:
            if len(self.waiting):
                await asyncio.wait({recovery}, timeout=self._limits.close_s)
            recovery.cancel()
        if self._opening is not None:
            self._opening.cancel()
        for record in self.waiting:
            self._count_lost(record, "shutdown")
        if lost := len(self.waiting):
            log.error("%d turns are lost: the store did not take them before the process ended", lost)
        closing = asyncio.ensure_future(self._store.aclose())
        await asyncio.wait({closing}, timeout=self._limits.close_s)
        if closing.done():
            closing.result()
        else:
            log.error("the store did not close within %g s", self._limits.close_s)

    async def read(self, call: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """The result of a call that changes nothing.

        Raises:
            StoreSkipped: calls before it failed.
            StoreStalled: its time is over.
            StoreError: it failed.
        """
        return await self._call(self._reads, call, *args)

    async def write(self, call: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """The result of a call that changes something. Raises as `read`."""
        return await self._call(self._writes, call, *args)

    async def record(self, record: Waiting) -> Evicted:
        """Add turns; those that the store does not take in time wait.

        Raises:
            RecordRefused: they cannot be recorded.
            StoreError: too much waits already.
        """
        error = self._error or StoreError("turns before it wait")
        # the order matters within a rollout: a turn waits for those before it
        if not self._skips(self._writes) and not self.waiting.has_rollout(record.session.id):
            try:
                return await self.write(self._store.add, record.session, record.turns, record.entries)
            except RecordRefused:
                self._count_lost(record, "refused")
                raise
            except StoreError as failure:
                # what is cancelled may be done all the same; to write it again then changes nothing
                error = failure
                self._metrics.store_errors.inc()
            except Exception:  # only to count it, whatever it is: the caller handles it
                self._count_lost(record, "refused")
                raise
        if not self.waiting.put(record):
            self._count_lost(record, "queue_full")
            raise StoreError(f"too many turns wait to be recorded ({len(self.waiting)}): {error}")
        self._recover_from(error)
        return Evicted()

    async def _call(self, breaker: Breaker, call: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        if self._skips(breaker):
            raise StoreSkipped(f"the store does not respond, and is tried again soon: {self._error}")
        with spending() as seconds:
            if not seconds:
                raise StoreStalled("the request has waited for the store as long as it may")
            try:
                result = await within(seconds, call(*args))
            except TimeoutError:
                error = StoreStalled(_too_long(seconds))
                self._failed(breaker, error)
                raise error from None
            except RecordRefused:
                raise
            except StoreError as failure:
                self._failed(breaker, failure)
                raise
        breaker.succeed()
        return result

    def _skips(self, breaker: Breaker) -> bool:
        """Whether calls are skipped. What cannot be read is not written either."""
        return not self._is_open or breaker.open or self._reads.open

    def _failed(self, breaker: Breaker, error: StoreError) -> None:
        breaker.fail()
        if breaker.open:
            self._recover_from(error)

    def _recover_from(self, error: StoreError) -> None:
        """Try the store again, in the background, until it works and no turn waits."""
        self._error = error
        if self._recovery is None:
            self._since = time.time()
            log.error("the store does not work; it is tried again until it does: %s", error)
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        start = time.monotonic()
        await asyncio.sleep(self._backoff.start())
        while not self._is_open or self._reads.open or self._writes.open or len(self.waiting):
            try:
                await self._try_again()
            except StoreError as error:
                self._error = error
                await asyncio.sleep(self._backoff.next())
            except Exception as error:  # the boundary: a trial that fails is repeated
                log.exception("the store cannot be tried")
                self._error = StoreError(str(error))
                await asyncio.sleep(self._backoff.next())
        self._backoff.recovered()
        self._recovery = None
        log.warning("the store works again, after %.1f s", time.monotonic() - start)

    async def _try_again(self) -> None:
        """One call of each kind that failed. Raises StoreError."""
        if not self._is_open:
            if self._opening is None or _has_failed(self._opening):
                self._opening = asyncio.ensure_future(self._store.open())
            await _in_background(asyncio.shield(self._opening))
            self._is_open = True
        if self._reads.open:
            await _in_background(self._store.find([_PROBE]))
            self._reads.succeed()
        if len(self.waiting):
            batch = self.waiting.next_batch()
            tried = [self._record_later(number, record) for number, record in batch.items()]
            errors = [error for error in await asyncio.gather(*tried) if error is not None]
            if errors:
                raise errors[0]
            self._writes.succeed()
        elif self._writes.open:
            # changes nothing, because no rollout has this name
            await _in_background(self._store.pin("", 0.0))
            self._writes.succeed()

    async def _record_later(self, number: int, record: Waiting) -> StoreError | None:
        """Record turns that wait. Returns why they have to wait on."""
        try:
            adding = self._store.add(record.session, record.turns, record.entries)
            evicted = await _in_background(adding)
        except RecordRefused as error:
            self._count_lost(record, "refused")
            log.error("a turn of %s is lost: %s", record.session.id, error)
        except StoreError as error:
            return error
        except Exception:  # the boundary: what cannot be recorded keeps no other turn waiting
            self._count_lost(record, "refused")
            log.exception("a turn of %s is lost", record.session.id)
        else:
            self._metrics.count_evicted(evicted.rollouts, evicted.undelivered)
        self.waiting.remove(number)
        return None

    def _count_lost(self, record: Waiting, reason: str) -> None:
        self._lost += len(record.turns)
        self._metrics.lost_turns.labels(reason).inc(len(record.turns))


async def _in_background(work: Awaitable[T]) -> T:
    try:
        return await within(BACKGROUND_S, work)
    except TimeoutError:
        raise StoreStalled(_too_long(BACKGROUND_S)) from None


def _has_failed(future: "asyncio.Future[Any]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _too_long(seconds: float) -> str:
    return f"no response within {seconds:.1f} s"
