"""A bounded, fair queue for requests that wait for a free place on a replica.

Tenants share the service by weight, and so do the sessions of a tenant; requests of one session are served
in the order in which they came. The order is that of start-time fair queueing (Goyal, Vin, Cheng: "Start-time
Fair Queueing", SIGCOMM 1996) at both levels. With prompt ids as weights, its tags count what the Virtual
Token Counter counts (Sheng et al.: "Fairness in Serving Large Language Models", OSDI 2024).

Law, for two tenants that both have requests waiting all the time, if every free place suits every request:

    | service of one - service of the other | <= largest weight of one + largest weight of the other

The queue is independent of replicas: it calls `try_take` to get a place, and a call of `wake` reports that
one became free.
"""

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from proxy.errors import Overloaded
from proxy.fleet.hold import Hold

T = TypeVar("T")

LOOK_AHEAD = 8
"""Number of a tenant's requests that are tried if the ones before them find no place."""
LOOKED_AT = 128
"""Number of requests of all tenants that may find no place in one wake before it ends."""
MAX_PASSED_OVER = 32
"""Number of requests that may be served before one that is first in line. Otherwise a large request could
wait for ever while small ones fill the gaps."""
_MAX_RETRY_AFTER_S = 60
_HELD_STEP_S = 1.0
"""Seconds between two looks at the time that is left while requests are held."""
_STALE = 64
"""Number of stale entries and idle flows that are kept before they are dropped."""


class FlowKey(NamedTuple):
    """Whose request it is."""

    tenant: str
    session: str


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    key: FlowKey
    weight: int
    try_take: Callable[[], T | None]
    kind: Hashable
    future: "asyncio.Future[T]"
    passed_over: int = 0


@dataclass(slots=True, eq=False)
class _Flow:
    """A competitor for service: a tenant, or a session of a tenant."""

    tag: float = 0.0
    """The virtual time of its level at which its next request starts."""
    entry: "tuple[float, int, _Flow] | None" = None
    """Its entry in the heap of its level; None while it has no requests waiting. Other entries are stale."""


@dataclass(slots=True, eq=False)
class _Session(_Flow, Generic[T]):
    waiting: "OrderedDict[_Waiter[T], None]" = field(default_factory=OrderedDict)
    """Its requests that wait, the oldest first."""


@dataclass(slots=True, eq=False)
class _Tenant(_Flow, Generic[T]):
    waiting: "OrderedDict[_Waiter[T], None]" = field(default_factory=OrderedDict)
    """All of its requests that wait, the oldest first."""
    level: "_Level[_Session[T]]" = field(default_factory=lambda: _Level())
    """Its sessions."""


F = TypeVar("F", bound=_Flow)


class _Level(Generic[F]):
    """Flows that compete: all tenants, or the sessions of one tenant."""

    def __init__(self) -> None:
        self.flows: dict[str, F] = {}
        """Those that compete, and idle ones whose past service still counts."""
        self.now = 0.0
        """Virtual time: the tag with which a flow starts that was idle."""
        self.competing = 0
        self._forget_at = _STALE
        """Number of flows at which idle ones are looked for."""
        self._heap: list[tuple[float, int, F]] = []
        self._number = 0

    def join(self, flow: F, *, idle: bool = True) -> None:
        """Add a flow to the competition. One that was idle gets no credit for that time."""
        if flow.entry is not None:
            return
        if idle:
            flow.tag = max(flow.tag, self.now)
        self._number += 1  # equal tags: first come, first served
        self.competing += 1
        entry = (flow.tag, self._number, flow)
        flow.entry = entry
        heapq.heappush(self._heap, entry)

    def leave(self, flow: F) -> None:
        """Remove a flow from the competition."""
        if flow.entry is None:
            return
        flow.entry = None
        self.competing -= 1
        if len(self._heap) > 2 * self.competing + _STALE:
            self._heap[:] = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def charge(self, flow: F, weight: int) -> None:
        """Count the service of a flow and remove it from the competition; `join` adds it further back."""
        # each service moves all that compete by their share; by the tag alone, flows that come with one
        # request each would always start before one that has waited
        self.now = max(flow.tag, self.now + weight / self.competing)
        flow.tag += weight
        self.leave(flow)

    def forget_idle(self) -> None:
        """Drop idle flows whose past service would not matter if they returned."""
        if len(self.flows) <= self._forget_at:
            return
        for name, flow in list(self.flows.items()):
            if flow.entry is None and flow.tag <= self.now:
                del self.flows[name]
        self._forget_at = 2 * len(self.flows) + _STALE

    def in_order(self) -> Generator[F]:
        """Yield the flows in the order of service, also new ones. Closing it puts them back."""
        taken = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if entry[2].entry is entry:
                    taken.append(entry)
                    yield entry[2]
        finally:
            for entry in taken:
                if entry[2].entry is entry:
                    heapq.heappush(self._heap, entry)


class FairQueue(Generic[T]):
    """Lets requests wait for a place, in a fair order. For one event loop.

    `T` is the type of a place: a replica or a reservation, anything but None.
    """

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float,
        give_back: Callable[[T], None],
        hold: Hold | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            max_waiting: requests that may wait; 0 lets none wait.
            timeout_s: how long each may wait.
            give_back: frees a place that was taken for a request that left before it was resumed.
            hold: while it is active, any number may wait, and the time does not count.
        """
        self._hold = hold or Hold()
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._give_back = give_back
        self._level: _Level[_Tenant[T]] = _Level()
        self._waiting = 0
        self._usual_wait_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._waiting

    async def acquire(
        self, key: FlowKey, weight: int, try_take: Callable[[], T | None], kind: Hashable = None
    ) -> T:
        """Take a place, or wait for one.

        Args:
            weight: the service that the request gets, for example its prompt ids; at least 1 is counted.
            kind: where a request finds no place, no heavier one of its kind does.
            try_take: takes a place and returns it, or returns None if none suits the request now. `wake`
                calls it too, so it must be quick, and must not call the queue. An error that it raises ends
                the wait of this request.

        Raises:
            Overloaded: as many requests wait as may, or none of the places became free in time.
        """
        # a free place may suit this request although it suits none of those that wait
        if (taken := self._overtake(try_take)) is not None:
            return taken
        self._refuse_newest(key.tenant)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(key, max(1, weight), try_take, kind, future)
        self._add(waiter)
        since = time.monotonic()
        try:
            await self._wait(future)
        except BaseException:  # cancellation too: nobody would use the place that the waiter gets
            self._abandon(waiter)
            raise
        if not future.done():
            self._abandon(waiter)
            self._waited(since)
            raise Overloaded(
                f"no replica had capacity for the request within {self._timeout_s:g} s (`queue_timeout_s`): "
                "try again later",
                code="queue_timeout",
                retry_after=self._retry_after(),
            )
        self._waited(since)
        return future.result()

    async def _wait(self, future: "asyncio.Future[T]") -> None:
        """Wait for a place, for as long as a request may. Time in which requests are held does not count."""
        began, held_s = time.monotonic(), self._hold.seconds()
        left_s = self._timeout_s
        while True:
            await asyncio.wait([future], timeout=left_s)
            waited_s = time.monotonic() - began - (self._hold.seconds() - held_s)
            left_s = self._timeout_s - waited_s
            if self._hold.active:
                left_s = max(left_s, _HELD_STEP_S)
            if future.done() or left_s <= 0:
                return

    def wake(self) -> None:
        """Serve as many waiting requests as find a place. Call it each time a place became free.

        Each is resumed after its place was taken, so none wakes in vain. Takes O(log n) for each served
        request, and looks at up to `LOOK_AHEAD` requests of each tenant, `LOOKED_AT` in all.
        """
        passed_over: dict[_Waiter[T], None] = {}
        too_heavy: dict[Hashable, int] = {}
        with closing(self._level.in_order()) as tenants:
            for tenant in tenants:
                if not self._serve_one(tenant, passed_over, too_heavy):
                    return
                if len(passed_over) >= LOOKED_AT:
                    return

    def _overtake(self, try_take: Callable[[], T | None]) -> T | None:
        """A place for a new request, if those that wait may still be overtaken."""
        ahead = [next(iter(tenant.waiting)) for tenant in self._level.flows.values() if tenant.waiting]
        if any(each.passed_over >= MAX_PASSED_OVER for each in ahead):
            return None
        taken = try_take()
        if taken is not None:
            for each in ahead:
                each.passed_over += 1
        return taken

    def _serve_one(
        self,
        tenant: _Tenant[T],
        passed_over: "dict[_Waiter[T], None]",
        too_heavy: dict[Hashable, int],
    ) -> bool:
        """Serve a tenant's first request that finds a place. False if one may no longer be overtaken.

        Args:
            passed_over: requests that found no place in this wake; those of the tenant are added.
            too_heavy: for each kind the smallest weight that found no place in this wake.
        """
        with closing(tenant.level.in_order()) as sessions:
            for session in islice(sessions, LOOK_AHEAD):
                waiter = next(iter(session.waiting))
                if waiter in passed_over:
                    continue  # places only get fewer during a wake
                least = too_heavy.get(waiter.kind)
                try:
                    taken = waiter.try_take() if least is None or waiter.weight < least else None
                except Exception as error:  # noqa: BLE001 - the boundary of the caller's function
                    self._remove(waiter, 0)
                    waiter.future.set_exception(error)
                    return True
                if taken is not None:
                    self._remove(waiter, waiter.weight)
                    waiter.future.set_result(taken)
                    for each in passed_over:
                        each.passed_over += 1
                    return True
                passed_over[waiter] = None
                too_heavy[waiter.kind] = min(waiter.weight, least or waiter.weight)
                if waiter.passed_over >= MAX_PASSED_OVER:
                    return False
        return True

    def _refuse_newest(self, tenant: str) -> None:
        """If the queue is full, refuse the newest request of the tenant with the most waiting requests.

        Raises:
            Overloaded: that would be the caller's own request.
        """
        if self._waiting < self._max_waiting or self._hold.active:
            return
        tenants = self._level.flows
        own = tenants.get(tenant)
        most = max((each.waiting for each in tenants.values()), key=len, default=OrderedDict())
        refusal = Overloaded(
            f"{self._waiting} requests already wait for a replica (`queue_requests`): try again later",
            code="queue_full",
            retry_after=self._retry_after(),
        )
        if len(most) <= 1 + (len(own.waiting) if own else 0):
            raise refusal
        newest = next(reversed(most))
        self._remove(newest)
        newest.future.set_exception(refusal)

    def _add(self, waiter: _Waiter[T]) -> None:
        tenant = self._level.flows.setdefault(waiter.key.tenant, _Tenant())
        session = tenant.level.flows.setdefault(waiter.key.session, _Session())
        session.waiting[waiter] = None
        tenant.waiting[waiter] = None
        self._waiting += 1
        tenant.level.join(session)
        self._level.join(tenant)

    def _remove(self, waiter: _Waiter[T], service: int | None = None) -> None:
        """Remove a request from the queue; `service` is the service that it got, None if it left unserved."""
        tenant = self._level.flows[waiter.key.tenant]
        session = tenant.level.flows[waiter.key.session]
        del session.waiting[waiter], tenant.waiting[waiter]
        self._waiting -= 1
        if service is not None:
            tenant.level.charge(session, service)
            self._level.charge(tenant, service)
        if session.waiting:
            tenant.level.join(session, idle=False)
        else:
            tenant.level.leave(session)
            tenant.level.forget_idle()
        if tenant.waiting:
            self._level.join(tenant, idle=False)
        else:
            self._level.leave(tenant)
        if self._waiting:
            self._level.forget_idle()
        else:
            self._level = _Level()

    def _waited(self, since: float) -> None:
        self._usual_wait_s += (time.monotonic() - since - self._usual_wait_s) / 8

    def _abandon(self, waiter: _Waiter[T]) -> None:
        """Remove a request whose client left from the queue, and give back its place."""
        if not waiter.future.done():
            self._remove(waiter)
        elif waiter.future.exception() is None:
            self._give_back(waiter.future.result())
        self.wake()  # the queue may have kept a place free for this request: let others have it

    def _retry_after(self) -> int:
        return min(_MAX_RETRY_AFTER_S, math.ceil(max(1.0, self._usual_wait_s)))
