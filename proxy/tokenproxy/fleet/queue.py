"""A bounded, fair queue for requests that wait for a free slot on a replica.

Requests are served by their priority. Within one, tenants take turns; requests of one tenant are served in
the order in which they came. Law, for two tenants that both have requests of one priority waiting all the
time:

    | requests of one that were served - requests of the other | <= 1

The queue is independent of replicas: it calls `try_take` to get a slot, and a call of `wake` reports that
one became free. If the first in line finds none, no other request is served, unless it lacks room in a cache:
then those that need less are served before it, in the same order. Whoever lets a request wait for room bounds
for how long.
"""

import asyncio
import math
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any, Generic, TypeVar

from tokenproxy.base.errors import Overloaded

T = TypeVar("T")

_RETRY_AFTER_S = 2
_SUSPENDED_STEP_S = 1.0
"""Seconds between two looks at the time that is left while requests are suspended."""


class Suspension:
    """The time during which new requests wait, because the fleet's weights change. One per fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active = False
        """Whether requests wait now."""
        self._since = 0.0
        self._before = 0.0
        """Seconds of earlier suspensions."""

    def seconds(self) -> float:
        """Seconds of all suspensions until now. It does not grow while there is none.

        The difference of two values is the part of the time between them that must not count as a timeout.
        """
        return self._before + (self._clock() - self._since if self.active else 0.0)

    def begin(self) -> None:
        """Let new requests wait. Does nothing if they do."""
        if not self.active:
            self.active, self._since = True, self._clock()

    def end(self) -> float:
        """Release requests; returns for how many seconds they waited."""
        before, self._before, self.active = self._before, self.seconds(), False
        return self._before - before


class Priority(IntEnum):
    """Which requests are served first."""

    ADMITTED = 0
    """They wait for a slot alone."""
    RETURNING = 1
    """Turns of conversations that lost their room in the cache of a replica."""
    NEW = 2
    """First turns of conversations."""


@dataclass(slots=True, eq=False)
class Lack:
    """What a request lacked when it last tried to take a slot."""

    room: int = 0
    """Ids that it needs at least in a cache; 0 if it lacked anything else, or did not try."""
    keys: tuple[Hashable, ...] = ()
    """If a cache holds what one of these stands for, the request may need less room than that."""
    kind: Hashable = None
    """Of requests of one kind, those that need more find no room where another one found none."""
    measure: Callable[[Any], None] = lambda cache: None
    """Measures `room` again after a cache got what one of the keys stands for."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    tenant: str
    priority: Priority
    try_take: Callable[[], T | None]
    lack: Lack
    future: "asyncio.Future[T]"
    keys: tuple[Hashable, ...] = ()
    """Those under which it is filed."""


class FairQueue(Generic[T]):
    """Lets requests wait for a slot, in a fair order. For one event loop.

    `T` is the type of a slot: a replica or a reservation, anything but None.
    """

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float,
        give_back: Callable[[T], None],
        suspension: Suspension | None = None,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Create an empty queue.

        Args:
            max_waiting: requests that may wait; 0 lets none wait.
            timeout_s: how long each may wait.
            give_back: frees a slot that was taken for a request that left before it was resumed.
            suspension: while it is active, any number may wait, and the time does not count.
            room: the most ids of room that a request could take now. One that lacks more is not tried.
        """
        self._suspension = suspension or Suspension()
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._give_back = give_back
        self._clock = clock
        self._room = room
        self.waiting = 0
        """Requests that wait now."""
        self._lines: tuple[OrderedDict[str, dict[_Waiter[T], None]], ...]
        self._lines = tuple(OrderedDict() for _ in Priority)
        """The requests that wait, by priority and tenant, the oldest first; the tenant whose turn it is
        first. No line is empty, so that a tenant that comes back is the last."""

        self._least = 0
        """No request that waits for room is served with less than this."""
        self._renewed = False
        """Whether requests need less room since `wake` looked at all."""
        self._filed: dict[Hashable, dict[_Waiter[T], None]] = {}
        """Requests that lack room, by the keys of what they lack."""

    def must_wait(self, priority: Priority) -> bool:
        """Whether a new request of a priority must wait for earlier requests that lack more than room.

        Earlier requests that fit by now are served first.
        """
        if not any(self._lines[: priority + 1]):
            return False
        return bool(self._lines[Priority.ADMITTED]) or not self.wake()

    async def acquire(
        self,
        tenant: str,
        try_take: Callable[[], T | None],
        priority: Priority = Priority.ADMITTED,
        timeout_s: float | None = None,
        lack: Lack | None = None,
    ) -> T:
        """Take a slot, or wait for one.

        Args:
            try_take: takes a slot and returns it, or returns None if none is free. `wake` calls it too, so
                it must be quick, and must not call the queue. An error that it raises ends the wait of this
                request.
            timeout_s: how long it may wait; None for the time of all requests.
            lack: `try_take` notes there what it lacks.

        Raises:
            Overloaded: as many requests wait as may, or none of the slots became free in time.
        """
        if not self.must_wait(priority) and (taken := try_take()) is not None:
            return taken
        self._refuse_newest(tenant)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(tenant, priority, try_take, lack or Lack(), future)
        self._lines[priority].setdefault(tenant, {})[waiter] = None
        self._refile(waiter)
        if priority is not Priority.ADMITTED:
            self._least = min(self._least, waiter.lack.room)
        self.waiting += 1
        try:
            await self._wait(future, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:  # cancellation too: nobody would use the slot that the waiter gets
            if not future.done():
                self._remove(waiter)
            elif future.exception() is None:
                self._give_back(future.result())
                self.wake()
            raise
        if future.done():
            return future.result()
        self._remove(waiter)
        message = f"no replica had capacity for the request within {self._timeout_s:g} s: try again later"
        raise Overloaded(message, code="queue_timeout", retry_after=_RETRY_AFTER_S)

    def wake(self) -> bool:
        """Serve as many waiting requests as find a slot. Call it each time a slot became free.

        Each is resumed after its slot was taken, so none wakes in vain. Returns whether all that still wait
        lack room, and nothing else.
        """
        if not self._serve(Priority.ADMITTED):
            return False
        self._renewed = True
        while self._renewed and any(self._lines[Priority.RETURNING :]) and self._least <= self._room():
            self._least, self._renewed = sys.maxsize, False
            if not (self._serve(Priority.RETURNING) and self._serve(Priority.NEW)):
                self._least = 0
                return False
        return True

    def renew(self, keys: Iterable[Hashable], cache: Any) -> None:
        """Measure requests again that may need less room, because a cache got what their keys stand for."""
        for key in keys:
            for waiter in list(self._filed.get(key, ())):
                waiter.lack.measure(cache)
                self._refile(waiter)
                self._least, self._renewed = min(self._least, waiter.lack.room), True

    def _serve(self, priority: Priority) -> bool:
        """Serve requests of a priority; returns False if one found no slot for another reason than room."""
        lines, passed = self._lines[priority], Counter[str]()
        turns, failed, least = deque(lines), dict[Hashable, int](), sys.maxsize
        room = self._room() if priority else math.inf
        while turns:
            tenant = turns.popleft()
            # those before lack room, and only less of it becomes free
            for waiter in islice(lines[tenant], passed[tenant], None):
                lack = waiter.lack
                if lack.room <= room and lack.room < failed.get(lack.kind, sys.maxsize):
                    if self._served(waiter):
                        failed.clear()
                        if tenant in lines:
                            lines.move_to_end(tenant)
                            turns.append(tenant)
                        room = self._room() if priority else math.inf
                        break
                    if not lack.room:
                        return False
                    failed[lack.kind] = lack.room
                passed[tenant] += 1
                if lack.room < least:
                    least = lack.room
        self._least = min(self._least, least)
        return True

    def _served(self, waiter: _Waiter[T]) -> bool:
        """Whether a request found a slot, or an error, and waits no longer."""
        try:
            taken = waiter.try_take()
        except Exception as error:  # noqa: BLE001 - the boundary of the caller's function
            self._remove(waiter)
            waiter.future.set_exception(error)
            return True
        if taken is None:
            self._refile(waiter)
            return False
        self._remove(waiter)
        waiter.future.set_result(taken)
        return True

    def _refile(self, waiter: _Waiter[T]) -> None:
        self._unfile(waiter)
        waiter.keys = waiter.lack.keys
        for key in waiter.keys:
            self._filed.setdefault(key, {})[waiter] = None

    def _unfile(self, waiter: _Waiter[T]) -> None:
        for key in waiter.keys:
            filed = self._filed[key]
            del filed[waiter]
            if not filed:
                del self._filed[key]
        waiter.keys = ()

    async def _wait(self, future: "asyncio.Future[T]", timeout_s: float) -> None:
        """Wait for a slot, for as long as a request may. A suspension does not count."""
        began, suspended_s = self._clock(), self._suspension.seconds()
        left_s = timeout_s
        while not future.done() and left_s > 0:
            await asyncio.wait([future], timeout=left_s)
            left_s = began + timeout_s - self._clock() + self._suspension.seconds() - suspended_s
            if self._suspension.active:
                left_s = max(left_s, _SUSPENDED_STEP_S)

    def _refuse_newest(self, tenant: str) -> None:
        """If the queue is full, refuse the newest request of the tenant with the most waiting requests.

        Raises:
            Overloaded: that would be the caller's own request.
        """
        if self.waiting < self._max_waiting or self._suspension.active:
            return
        message = f"{self.waiting} requests already wait for a replica: try again later"
        refusal = Overloaded(message, code="queue_full", retry_after=_RETRY_AFTER_S)
        counts = Counter[str]()
        for lines in self._lines:
            counts.update({each: len(line) for each, line in lines.items()})
        most = max(counts, key=counts.__getitem__, default=tenant)
        if counts[most] <= 1 + counts[tenant]:
            raise refusal
        newest = next(reversed(next(lines[most] for lines in reversed(self._lines) if most in lines)))
        self._remove(newest)
        newest.future.set_exception(refusal)

    def _remove(self, waiter: _Waiter[T]) -> None:
        self._unfile(waiter)
        lines = self._lines[waiter.priority]
        line = lines[waiter.tenant]
        del line[waiter]
        self.waiting -= 1
        if not line:
            del lines[waiter.tenant]
