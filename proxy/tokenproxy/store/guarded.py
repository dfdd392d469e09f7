"""A store that holds a request up for at most a second, also when it hangs or fails.

- A call takes no longer than what its request has left of its time: see `tokenproxy.record.store_time`.
- After three failures in a row calls are skipped. Reads and writes count apart: a SQLite file that another
  process locks can still be read. Trials in the background find out when the store works again; no request
  waits for one.
- A turn that the store does not take in time waits, and is recorded before any other of its rollout;
  meanwhile this process finds it next to those that the store finds. While the store cannot be read nothing
  is found: only the store knows whether other turns have the same text.
- So does a document (a stored response), which nothing else holds: this process reads it from where it waits.
- What is lost, because too much waits or the process ends, is logged and counted.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import (
    ALL,
    DESCRIPTION,
    DOCUMENTS,
    Before,
    Evicted,
    RecordDamaged,
    RecordRefused,
    Session,
    Store,
    StoreError,
    StoreSkipped,
    StoreStalled,
    StoreUnusable,
)
from tokenproxy.record.store_time import BACKGROUND_S, StoreTime, running_store_time, within
from tokenproxy.record.turn import NOTHING, Found, IndexedTurn, Turn
from tokenproxy.store.backlog import Backlog, StoreHealth
from tokenproxy.store.packed import complete_path, fill_prompts

log = logging.getLogger("tokenproxy")

P = ParamSpec("P")
T = TypeVar("T")

START_S = 3.0
"""How long the start of the proxy waits for the store, if it can do without."""
_FAILURES = 3
"""Calls that fail in a row before others are skipped."""
_PROBE = bytes(16)
"""A key under which nothing is."""
_READS = frozenset(["find", "path", "turns", "newest", "session", "sessions", "feed", "get"])


@dataclass(frozen=True)
class GuardLimits:
    """How long a guarded store waits, in seconds, and how many turns it holds until they are recorded."""

    start_s: float = START_S
    close_s: float = 5.0
    """How long the end waits for turns to be recorded, and then for the store to close."""
    first_wait_s: float = 0.1
    """From the first trial that fails to the second; each next wait is twice as long."""
    longest_wait_s: float = 3.0
    most_turns: int = 10_000
    most_bytes: int = 128 * 2**20


def _guarded(
    method: Callable[Concatenate[Store, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["GuardedStore", P], Coroutine[Any, Any, T]]:
    """A method of `Store` that a guarded store calls within its limits."""
    name = method.__name__

    async def call(guard: "GuardedStore", /, *args: P.args, **named: P.kwargs) -> T:
        of_store: Callable[P, Awaitable[T]] = getattr(guard._store, name)
        return await guard._call(name, of_store, *args, **named)

    return call


class GuardedStore:
    """A `Store` that may stall, fail, or be missing at first."""

    release, pin, evict = _guarded(Store.release), _guarded(Store.pin), _guarded(Store.evict)
    delete, finish = _guarded(Store.delete), _guarded(Store.finish)
    sessions, feed = _guarded(Store.sessions), _guarded(Store.feed)

    def __init__(
        self, store: Store, metrics: Metrics, *, required: bool = False, limits: GuardLimits = GuardLimits()
    ) -> None:
        """`required`: whether `open` fails if the store does not respond."""
        self.limits, self.unreadable = store.limits, store.unreadable
        self._store = store
        self._metrics = metrics
        self._time_of = cache(metrics.store_time.labels)
        """Returns the histogram of a method's times."""
        self._required = required
        self._guard = limits
        self._backlog = Backlog(metrics, limits.most_turns, limits.most_bytes)
        self._failures = {"read": 0, "write": 0}
        """Calls of each kind that failed in a row."""
        self._opening: asyncio.Future[None] | None = None
        self._is_open = False
        self._recovery: asyncio.Task[None] | None = None
        """Runs while something is wrong."""
        self._since: float | None = None
        self._error: StoreError | None = None
        """The last one, and since when something is wrong; None while all is well."""
        self._late: set[asyncio.Task[None]] = set()
        """Releases of turns that were claimed too late."""

    def health(self) -> StoreHealth:
        """How the store does now."""
        return StoreHealth.of(self._error, self._since, self._backlog, self.unreadable)

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
            if self._backlog:
                await asyncio.wait({recovery}, timeout=self._guard.close_s)
            recovery.cancel()
        if self._late:
            await asyncio.wait(self._late, timeout=self._guard.close_s)
        if self._opening is not None:
            self._opening.cancel()
        lost, documents = self._backlog.turns(), self._backlog.documents
        self._backlog.count_lost(lost, "shutdown")
        if lost or documents:
            kinds = f"{len(lost)} turns and {len(documents)} stored responses"
            log.error("%s are lost: the store did not take them before the process ended", kinds)
        closing = asyncio.ensure_future(self._store.aclose())
        await asyncio.wait({closing}, timeout=self._guard.close_s)
        if closing.done():
            closing.result()
        else:
            log.error("the store did not close within %g s", self._guard.close_s)

    async def add(
        self, session: Session, turns: Sequence[IndexedTurn] = (), *, fields: Collection[str] = DESCRIPTION
    ) -> Evicted:
        """See `Store.add`. Turns that the store does not take in time are recorded later.

        Raises:
            RecordRefused: it cannot be recorded.
            StoreError: too much waits already.
        """
        if not turns:
            self._check_complete(session.id)
            return await self._call("add", self._store.add, session, fields=fields)
        error = self._error or StoreError("turns before it wait")
        # the order matters within a rollout: a turn waits for those before it
        if not self._backlog.holds(session.id):
            try:
                return await self._call("add", self._store.add, session, turns)
            except StoreSkipped:
                pass  # nothing failed here: the turn waits until the store works again
            except StoreError as failure:
                if isinstance(failure, RecordRefused):
                    self._backlog.count_lost(turns, "refused")
                    raise
                # what is cancelled may be done all the same; to write it again then changes nothing
                error = failure
                self._metrics.store_errors.inc()
            except Exception:  # counted here, and raised again for the caller
                self._backlog.count_lost(turns, "refused")
                raise
        if not self._backlog.add(session, turns):
            self._backlog.count_lost(turns, "queue_full")
            waiting = len(self._backlog.turns())
            raise StoreError(f"too many turns wait to be recorded ({waiting}): {error}")
        self._recover_from(error)
        return Evicted()

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        # before the store is read: turns that it takes meanwhile are found in both
        here = self._backlog.under(keys)
        found = await self._call("find", self._store.find, keys)
        for entry, candidate in here:
            found[entry.key] = found.get(entry.key, NOTHING).with_candidate(entry.ids, candidate)
        return found

    async def put(
        self,
        space: str,
        name: str,
        value: bytes | None,
        *,
        keep_s: float | None = None,
        before: Before = ...,
        most: int = ALL,
    ) -> bool:
        """See `Store.put`. False for a document that the store does not take in time: it is stored later."""
        waiting = self._backlog.documents if space == DOCUMENTS else {}
        if value is None and waiting.pop(name, None) is not None:
            return True
        try:
            limits: dict[str, Any] = {"keep_s": keep_s, "before": before, "most": most}
            return await self._call("put", self._store.put, space, name, value, **limits)
        except RecordRefused:
            raise  # it would be refused again
        except StoreError as error:
            if space != DOCUMENTS or value is None or not self._backlog.add_document(name, value, keep_s):
                raise
            self._recover_from(error)
            return False

    async def get(
        self, space: str, names: Sequence[str] | None = None, *, complete: bool = False
    ) -> dict[str, bytes]:
        """See `Store.get`."""
        waiting = self._backlog.documents if space == DOCUMENTS else {}
        here = {name: waiting[name][0] for name in names or () if name in waiting}
        if here and len(here) == len(names or ()):
            return here
        return here | await self._call("get", self._store.get, space, names, complete=complete)

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """See `Store.claim`. A turn that is claimed too late is released."""
        claimed: list[asyncio.Future[str | None]] = []

        def claim() -> Awaitable[str | None]:
            claimed.append(asyncio.ensure_future(self._store.claim(key, ids)))
            return asyncio.shield(claimed[-1])

        try:
            while turn := await self._call("claim", claim):
                # one that a waiting turn continues is not open, although the store does not know yet
                if not any(each.parent == turn for each in self._backlog.turns().values()):
                    break
            return turn
        except BaseException:  # cancellation too: no other request could use a turn that stays claimed
            if claimed and not (claimed[-1].done() and claimed[-1].exception()):
                self._late.add(task := asyncio.create_task(self._release_late(claimed[-1])))
                task.add_done_callback(self._late.discard)
            raise

    async def path(self, turn: str, limit: int = ALL) -> list[Turn]:
        """See `Store.path`."""
        waiting = self._backlog.turns().get(turn)
        if waiting is None:
            return await self._call("path", self._store.path, turn, limit)
        return complete_path(turn, {each.id: each for each in await self.turns(waiting.rollout)}, limit)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        here = self._backlog.turns(rollout)
        stored = await self._call("turns", self._store.turns, rollout)
        if not here:
            return stored
        turns = {**here, **{turn.id: turn for turn in stored}}
        return fill_prompts([turns[name] for name in sorted(turns)], turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        here = self._backlog.turns(rollout)
        stored = await self._call("newest", self._store.newest, rollout, limit)
        return sorted({*here, *stored}, reverse=True)[:limit] if here else stored

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        records = self._backlog.records.values()
        here = [record.session for record in records if record.session.id == rollout]
        turns = len(self._backlog.turns(rollout))
        stored = await self._call("session", self._store.session, rollout)
        return stored or (replace(here[0], turns=turns) if here else None)

    async def _call(
        self, name: str, method: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs
    ) -> T:
        """The result of a call.

        Raises:
            StoreSkipped: calls before it failed.
            StoreStalled: its time is over, or it changes a rollout as a whole and turns of that wait.
            StoreError: it failed.
        """
        if name in ("delete", "finish"):
            self._check_complete(str(args[0]))
        kind = "read" if name in _READS else "write"
        if self._skips(kind):
            raise StoreSkipped(f"the store does not respond, and is tried again soon: {self._error}")
        limit = running_store_time()
        if limit.left <= 0:
            raise StoreStalled("the request has waited for the store as long as it may")
        try:
            result = await self._timed(name, method(*args, **named), limit)
        except (RecordDamaged, RecordRefused):
            raise
        except StoreError as error:
            self._failures[kind] += 1
            if self._failures[kind] >= _FAILURES:
                self._recover_from(error)
            raise
        self._failures[kind] = 0
        return result

    async def _timed(self, name: str, work: Awaitable[T], limit: StoreTime | None = None) -> T:
        """The result of a call, which is counted and timed. Raises StoreStalled if it takes too long."""
        limit = limit or StoreTime(BACKGROUND_S)
        began = perf_counter()
        self._metrics.store_calls.inc()
        try:
            return await within(limit.left, work)
        except TimeoutError:
            raise StoreStalled(f"no response within {limit.left:.1f} s") from None
        finally:
            seconds = perf_counter() - began
            limit.left -= seconds
            self._metrics.store_calls.dec()
            self._time_of(name).observe(seconds)

    def _check_complete(self, rollout: str) -> None:
        """Refuse to change a rollout as a whole while turns of it wait."""
        if self._backlog.holds(rollout):
            raise StoreStalled("turns of this session are still to be recorded: try again soon")

    def _skips(self, kind: str) -> bool:
        """Whether calls are skipped. What cannot be read is not written either."""
        return not self._is_open or max(self._failures[kind], self._failures["read"]) >= _FAILURES

    def _recover_from(self, error: StoreError) -> None:
        """Try the store again, in the background, until it works and no turn waits."""
        self._error = error
        if self._recovery is None:
            self._since = time.time()
            log.error("the store does not work; it is tried again until it does: %s", error)
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        start, wait_s = perf_counter(), self._guard.first_wait_s
        while self._skips("write") or self._backlog:
            try:
                await self._try_again()
            except Exception as error:  # the boundary: a trial that fails is repeated
                if not isinstance(error, StoreError):
                    log.exception("the store cannot be tried")
                self._error = error if isinstance(error, StoreError) else StoreError(str(error))
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, self._guard.longest_wait_s)
        self._recovery = self._since = self._error = None
        log.warning("the store works again, after %.1f s", perf_counter() - start)

    async def _try_again(self) -> None:
        """One call of each kind that failed. Raises StoreError."""
        if not self._is_open:
            opening = self._opening
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
                self._opening = opening = asyncio.ensure_future(self._store.open())
            await self._timed("open", asyncio.shield(opening))
            self._is_open = True
        if self._failures["read"] >= _FAILURES:
            await self._timed("find", self._store.find([_PROBE]))
            self._failures["read"] = 0
        await self._backlog.offer(self._store, self._timed)
        if self._failures["write"] >= _FAILURES:
            # changes nothing, because no rollout has this name
            await self._timed("pin", self._store.pin("", 0.0))
        self._failures["write"] = 0

    async def _release_late(self, claiming: "asyncio.Future[str | None]") -> None:
        try:
            if turn := await claiming:
                await self._store.release(turn)
        except StoreError as error:
            error.report(self._metrics, "a turn that was claimed in vain may stay claimed")
