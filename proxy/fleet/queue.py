"""A bounded, fair queue for requests that wait for a free place on a replica.

Tenants share the service by weight; requests of one tenant are served in the order in which they came. The
order is that of start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996). With
prompt ids as weights, its tags count what the Virtual Token Counter counts (Sheng et al.: "Fairness in
Serving Large Language Models", OSDI 2024).

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
from typing import Generic, TypeVar

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
"""Number of stale entries and idle tenants that are kept before they are dropped."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    tenant: str
    weight: int
    try_take: Callable[[], T | None]
    kind: Hashable
    future: "asyncio.Future[T]"
    passed_over: int = 0


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    tag: float = 0.0
    """The virtual time at which its next request starts."""
    entry: "tuple[float, int, _Tenant[T]] | None" = None
    """Its entry in the heap; None while it has no requests waiting. Other entries are stale."""
    waiting: "OrderedDict[_Waiter[T], None]" = field(default_factory=OrderedDict)
    """Its requests that wait, the oldest first."""


class _Tenants(Generic[T]):
    """The tenants that compete for service."""

    def __init__(self) -> None:
        self.by_name: dict[str, _Tenant[T]] = {}
        """Those that compete, and idle ones whose past service still counts."""
        self.now = 0.0
        """Virtual time: the tag with which a tenant starts that was idle."""
        self.competing = 0
        self._forget_at = _STALE
        """Number of tenants at which idle ones are looked for."""
        self._heap: list[tuple[float, int, _Tenant[T]]] = []
        self._number = 0

    def join(self, tenant: _Tenant[T], *, idle: bool = True) -> None:
        """Add a tenant to the competition. One that was idle gets no credit for that time."""
        if tenant.entry is not None:
            return
        if idle:
            tenant.tag = max(tenant.tag, self.now)
        self._number += 1  # equal tags: first come, first served
        self.competing += 1
        entry = (tenant.tag, self._number, tenant)
        tenant.entry = entry
        heapq.heappush(self._heap, entry)

    def leave(self, tenant: _Tenant[T]) -> None:
        """Remove a tenant from the competition."""
        if tenant.entry is None:
            return
        tenant.entry = None
        self.competing -= 1
        if len(self._heap) > 2 * self.competing + _STALE:
            self._heap[:] = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def charge(self, tenant: _Tenant[T], weight: int) -> None:
        """Count the service of a tenant and remove it from the competition; `join` adds it further back."""
        # each service moves all that compete by their share; by the tag alone, tenants that come with one
        # request each would always start before one that has waited
        self.now = max(tenant.tag, self.now + weight / self.competing)
        tenant.tag += weight
        self.leave(tenant)

    def forget_idle(self) -> None:
        """Drop idle tenants whose past service would not matter if they returned."""
        if len(self.by_name) <= self._forget_at:
            return
        for name, tenant in list(self.by_name.items()):
            if tenant.entry is None and tenant.tag <= self.now:
                del self.by_name[name]
        self._forget_at = 2 * len(self.by_name) + _STALE

    def in_order(self) -> Generator[_Tenant[T]]:
        """Yield the tenants in the order of service, also new ones. Closing it puts them back."""
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
        clock: Callable[[], float] = time.monotonic,
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
        self._clock = clock
        self._tenants: _Tenants[T] = _Tenants()
        self._waiting = 0
        self._usual_wait_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._waiting

    async def acquire(
        self, tenant: str, weight: int, try_take: Callable[[], T | None], kind: Hashable = None
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
        self._refuse_newest(tenant)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(tenant, max(1, weight), try_take, kind, future)
        self._add(waiter)
        since = self._clock()
        try:
            await self._wait(future)
        except BaseException:  # cancellation too: nobody would use the place that the waiter gets
            self._abandon(waiter)
            raise
        if not future.done():
            self._abandon(waiter)
            self._waited(since)
            raise Overloaded(
                f"no replica had capacity for the request within {self._timeout_s:g} s: try again later",
                code="queue_timeout",
                retry_after=self._retry_after(),
            )
        self._waited(since)
        return future.result()

    async def _wait(self, future: "asyncio.Future[T]") -> None:
        """Wait for a place, for as long as a request may. Time in which requests are held does not count."""
        began, held_s = self._clock(), self._hold.seconds()
        left_s = self._timeout_s
        while True:
            await asyncio.wait([future], timeout=left_s)
            waited_s = self._clock() - began - (self._hold.seconds() - held_s)
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
        with closing(self._tenants.in_order()) as tenants:
            for tenant in tenants:
                if not self._serve_one(tenant, passed_over, too_heavy):
                    return
                if len(passed_over) >= LOOKED_AT:
                    return

    def _overtake(self, try_take: Callable[[], T | None]) -> T | None:
        """A place for a new request, if those that wait may still be overtaken."""
        ahead = [next(iter(tenant.waiting)) for tenant in self._tenants.by_name.values() if tenant.waiting]
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
        for waiter in list(islice(tenant.waiting, LOOK_AHEAD)):
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
        tenants = self._tenants.by_name
        own = tenants.get(tenant)
        most = max((each.waiting for each in tenants.values()), key=len, default=OrderedDict())
        refusal = Overloaded(
            f"{self._waiting} requests already wait for a replica: try again later",
            code="queue_full",
            retry_after=self._retry_after(),
        )
        if len(most) <= 1 + (len(own.waiting) if own else 0):
            raise refusal
        newest = next(reversed(most))
        self._remove(newest)
        newest.future.set_exception(refusal)

    def _add(self, waiter: _Waiter[T]) -> None:
        tenant = self._tenants.by_name.setdefault(waiter.tenant, _Tenant())
        tenant.waiting[waiter] = None
        self._waiting += 1
        self._tenants.join(tenant)

    def _remove(self, waiter: _Waiter[T], service: int | None = None) -> None:
        """Remove a request from the queue; `service` is the service that it got, None if it left unserved."""
        tenant = self._tenants.by_name[waiter.tenant]
        del tenant.waiting[waiter]
        self._waiting -= 1
        if service is not None:
            self._tenants.charge(tenant, service)
        if tenant.waiting:
            self._tenants.join(tenant, idle=False)
        else:
            self._tenants.leave(tenant)
        if self._waiting:
            self._tenants.forget_idle()
        else:
            self._tenants = _Tenants()

    def _waited(self, since: float) -> None:
        self._usual_wait_s += (self._clock() - since - self._usual_wait_s) / 8

    def _abandon(self, waiter: _Waiter[T]) -> None:
        """Remove a request whose client left from the queue, and give back its place."""
        if not waiter.future.done():
            self._remove(waiter)
        elif waiter.future.exception() is None:
            self._give_back(waiter.future.result())
        self.wake()  # the queue may have kept a place free for this request: let others have it

    def _retry_after(self) -> int:
        return min(_MAX_RETRY_AFTER_S, math.ceil(max(1.0, self._usual_wait_s)))
