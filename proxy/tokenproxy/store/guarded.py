"""A store that holds a request up for at most a second, also when it hangs or fails.

- A call takes no longer than what its request has left of its time: see `tokenproxy.record.store_time`.
- After three failures in a row calls are skipped. Reads and writes count apart: a SQLite file that another
  process locks can still be read. Trials in the background find out when the store works again; no request
  waits for one.
- A turn that the store does not take in time waits, and is recorded before any other of its rollout;
  meanwhile this process finds it next to those that the store finds. While the store cannot be read nothing
  is found: only the store knows whether other turns have the same text.
- What is lost, because too much waits or the process ends, is logged and counted.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import (
    Evicted,
    Found,
    IndexEntry,
    RecordRefused,
    Session,
    Store,
    StoreError,
    StoreSkipped,
    StoreStalled,
    StoreUnusable,
)
from tokenproxy.record.store_time import BACKGROUND_S, spending, within
from tokenproxy.record.turn import Turn
from tokenproxy.store.packed import complete_path, fill_prompts, missing_holders
from tokenproxy.store.waiting import MOST_BYTES, MOST_TURNS, Waiting, WaitingTurns

log = logging.getLogger("tokenproxy")

T = TypeVar("T")

START_S = 3.0
"""How long the start of the proxy waits for the store, if it can do without."""
_FAILURES = 3
"""Calls that fail in a row before others are skipped."""
_FORGIVEN_AFTER_S = 30.0
"""A store that worked for so long is tried again at once, however often it failed before."""
_PROBE = bytes(16)
"""A key under which nothing is."""
_READS = frozenset(
    {
        "find",
        "path",
        "turns",
        "newest",
        "session",
        "sessions",
        "rewards",
        "finished",
        "feed_state",
        "get",
        "usage",
    }
)
_OF_COMPLETE = frozenset({"save_session", "delete", "set_rewards", "finish"})
"""Calls that change a rollout as a whole: refused while turns of it wait."""


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the store of one process does: a part of `/ready`."""

    state: Literal["ok", "stalled", "unavailable"]
    """`stalled`: it does not respond in time, or another process holds its lock; `unavailable`: it fails."""
    since: float | None
    """When that began, in seconds since the epoch; None if all is well."""
    error: str | None
    """Message of the last error."""
    queued_turns: int
    """Turns that wait to be recorded."""
    lost_turns: int
    """Turns that were never recorded, since the process started."""


@dataclass(frozen=True)
class GuardLimits:
    """How long a guarded store waits, in seconds, and how many turns it holds until they are recorded."""

    start_s: float = START_S
    close_s: float = 5.0
    """How long the end waits for turns to be recorded, and then for the store to close."""
    first_wait_s: float = 0.1
    """From the first trial that fails to the second; each next wait is twice as long."""
    longest_wait_s: float = 3.0
    most_turns: int = MOST_TURNS
    most_bytes: int = MOST_BYTES


class GuardedStore:
    """A `Store` that may stall, fail, or be missing at first. `__getattr__` makes all its other calls."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        required: bool = False,
        limits: GuardLimits = GuardLimits(),
    ) -> None:
        """`required`: whether `open` fails if the store does not respond."""
        self.limits = store.limits
        self._store = store
        self._metrics = metrics
        self._required = required
        self._guard = limits
        self._waiting = WaitingTurns(limits.most_turns, limits.most_bytes)
        self._failures = {"read": 0, "write": 0}
        """Calls of each kind that failed in a row."""
        self._opening: asyncio.Future[None] | None = None
        self._is_open = False
        self._recovery: asyncio.Task[None] | None = None
        """Runs while something is wrong."""
        self._wait_s = self._healthy_since = self._since = 0.0
        self._error: StoreError | None = None
        self._lost = 0
        self._late: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        """A call of the store, made within its limits."""
        method = getattr(self._store, name)
        kind = "read" if name in _READS else "write"

        async def call(*args: Any, **named: Any) -> Any:
            if name in _OF_COMPLETE:
                rollout = args[0].id if name == "save_session" else args[0]
                if self._waiting.of_rollout(rollout):
                    raise StoreStalled("turns of this session are still to be recorded: try again soon")
            return await self._call(kind, lambda: method(*args, **named))

        return call

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
            queued_turns=len(self._waiting),
            lost_turns=self._lost,
        )

    async def open(self) -> None:
        """Open the store. One that does not respond is tried again later, unless it is required.

        Raises:
            StoreError: it is required, or can never be used.
        """
        self._opening = asyncio.ensure_future(self._store.open())
        start_s = self._guard.start_s
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
            if len(self._waiting):
                await asyncio.wait({recovery}, timeout=self._guard.close_s)
            recovery.cancel()
        if self._opening is not None:
            self._opening.cancel()
        for record in self._waiting:
            self._count_lost(record, "shutdown")
        if lost := len(self._waiting):
            log.error("%d turns are lost: the store did not take them before the process ended", lost)
        closing = asyncio.ensure_future(self._store.aclose())
        await asyncio.wait({closing}, timeout=self._guard.close_s)
        if closing.done():
            closing.result()
        else:
            log.error("the store did not close within %g s", self._guard.close_s)

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`. What the store does not take in time is recorded later.

        Raises:
            RecordRefused: it cannot be recorded.
            StoreError: too much waits already.
        """
        record = Waiting(session, turns, entries)
        error = self._error or StoreError("turns before it wait")
        # the order matters within a rollout: a turn waits for those before it
        if not self._skips("write") and not self._waiting.of_rollout(session.id):
            try:
                return await self._call("write", lambda: self._store.add(session, turns, entries))
            except RecordRefused:
                self._count_lost(record, "refused")
                raise
            except StoreError as failure:
                # what is cancelled may be done all the same; to write it again then changes nothing
                error = failure
                self._metrics.store_errors.inc()
            except Exception:  # counted here, and raised again for the caller
                self._count_lost(record, "refused")
                raise
        if not self._waiting.put(record):
            self._count_lost(record, "queue_full")
            raise StoreError(f"too many turns wait to be recorded ({len(self._waiting)}): {error}")
        self._recover_from(error)
        return Evicted()

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        # before the store is read: turns that it takes meanwhile are found in both
        here = self._waiting.look_up(keys)
        found = await self._call("read", lambda: self._store.find(keys))
        return self._waiting.find_too(found, here) if here else found

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """See `Store.claim`. A turn that is claimed too late is released."""
        claimed: list[asyncio.Future[str | None]] = []

        def claim() -> Awaitable[str | None]:
            claimed.append(asyncio.ensure_future(self._store.claim(key, ids)))
            return asyncio.shield(claimed[-1])

        try:
            # one that a waiting turn continues is not open, although the store does not know yet
            while (turn := await self._call("write", claim)) and self._waiting.is_continued(turn):
                pass
            return turn
        except BaseException:  # cancellation too: no other request could use a turn that stays claimed
            if claimed and not (claimed[-1].done() and claimed[-1].exception()):
                self._late.add(task := asyncio.create_task(self._release_late(claimed[-1])))
                task.add_done_callback(self._late.discard)
            raise

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""
        here = self._waiting.path(turn)
        if not here:
            return await self._call("read", lambda: self._store.path(turn))
        turns = {each.id: each for each in here}
        for name in (here[0].parent, *missing_holders(here, turns)):
            # the turns before them, and another choice of a request: it may wait, or be recorded already
            if name is not None and name not in turns:
                turns |= {each.id: each for each in await self.path(name)}
        return complete_path(turn, turns)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        here = self._waiting.of_rollout(rollout)
        stored = await self._call("read", lambda: self._store.turns(rollout))
        if not here:
            return stored
        turns = {turn.id: turn for turn in (*here, *stored)}
        return fill_prompts([turns[name] for name in sorted(turns)], turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        here = {turn.id for turn in self._waiting.of_rollout(rollout)}
        stored = await self._call("read", lambda: self._store.newest(rollout, limit))
        return sorted(here.union(stored), reverse=True)[:limit] if here else stored

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        here = self._waiting.session(rollout)
        return await self._call("read", lambda: self._store.session(rollout)) or here

    async def _call(self, kind: str, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call.

        Raises:
            StoreSkipped: calls before it failed.
            StoreStalled: its time is over.
            StoreError: it failed.
        """
        if self._skips(kind):
            raise StoreSkipped(f"the store does not respond, and is tried again soon: {self._error}")
        with spending() as seconds:
            if not seconds:
                raise StoreStalled("the request has waited for the store as long as it may")
            try:
                result = await within(seconds, call())
            except RecordRefused:
                raise
            except (TimeoutError, StoreError) as failure:
                error = failure if isinstance(failure, StoreError) else StoreStalled(_too_long(seconds))
                self._failures[kind] += 1
                if self._fails(kind):
                    self._recover_from(error)
                raise error from None
        self._failures[kind] = 0
        return result

    def _fails(self, kind: str) -> bool:
        return self._failures[kind] >= _FAILURES

    def _skips(self, kind: str) -> bool:
        """Whether calls are skipped. What cannot be read is not written either."""
        return not self._is_open or self._fails(kind) or self._fails("read")

    def _recover_from(self, error: StoreError) -> None:
        """Try the store again, in the background, until it works and no turn waits."""
        self._error = error
        if self._recovery is None:
            self._since = time.time()
            log.error("the store does not work; it is tried again until it does: %s", error)
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        start = time.monotonic()
        if start - self._healthy_since > _FORGIVEN_AFTER_S:
            self._wait_s = 0.0
        await asyncio.sleep(self._wait_s)
        while not self._is_open or self._fails("read") or self._fails("write") or len(self._waiting):
            try:
                await self._try_again()
            except Exception as error:  # the boundary: a trial that fails is repeated
                if not isinstance(error, StoreError):
                    log.exception("the store cannot be tried")
                self._error = error if isinstance(error, StoreError) else StoreError(str(error))
                self._wait_s = min(
                    max(2 * self._wait_s, self._guard.first_wait_s), self._guard.longest_wait_s
                )
                await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._healthy_since = time.monotonic()
        self._recovery = None
        log.warning("the store works again, after %.1f s", self._healthy_since - start)

    async def _try_again(self) -> None:
        """One call of each kind that failed. Raises StoreError."""
        if not self._is_open:
            opening = self._opening
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
                self._opening = opening = asyncio.ensure_future(self._store.open())
            await _in_background(asyncio.shield(opening))
            self._is_open = True
        if self._fails("read"):
            await _in_background(self._store.find([_PROBE]))
            self._failures["read"] = 0
        if len(self._waiting):
            batch = self._waiting.next_batch().items()
            tried = [self._record_later(number, record) for number, record in batch]
            errors = [error for error in await asyncio.gather(*tried) if error is not None]
            if errors:
                raise errors[0]
        elif self._fails("write"):
            # changes nothing, because no rollout has this name
            await _in_background(self._store.pin("", 0.0))
        self._failures["write"] = 0

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
        self._waiting.remove(number)
        return None

    async def _release_late(self, claiming: "asyncio.Future[str | None]") -> None:
        try:
            if turn := await claiming:
                await self._store.release(turn)
        except StoreError as error:
            self._metrics.store_errors.inc()
            log.error("a turn that was claimed in vain may stay claimed: %s", error)

    def _count_lost(self, record: Waiting, reason: str) -> None:
        self._lost += len(record.turns)
        self._metrics.lost_turns.labels(reason).inc(len(record.turns))


async def _in_background(work: Awaitable[T]) -> T:
    try:
        return await within(BACKGROUND_S, work)
    except TimeoutError:
        raise StoreStalled(_too_long(BACKGROUND_S)) from None


def _too_long(seconds: float) -> str:
    return f"no response within {seconds:.1f} s"
