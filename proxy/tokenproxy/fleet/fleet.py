"""All engines of the proxy: which one serves a request, and what happens if it fails."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tokenproxy.base.errors import ApiError, EngineBroken, EngineTimeout, EngineUnavailable, NotFound
from tokenproxy.base.http import Request, Response
from tokenproxy.fleet.choosing import Candidate, Choose, sticky_least_loaded
from tokenproxy.fleet.conversations import Conversations
from tokenproxy.fleet.dispatch import Dispatch, Place, Suspects, Work
from tokenproxy.fleet.health import BreakerState
from tokenproxy.fleet.load import Lease, work_of
from tokenproxy.fleet.model import FleetModel, choose_model
from tokenproxy.fleet.prefix_caches import PrefixCaches
from tokenproxy.fleet.queue import FairQueue
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.replica_report import report
from tokenproxy.fleet.routing import Routing
from tokenproxy.fleet.watch import FleetWatch
from tokenproxy.fleet.weights import TIMEOUT_S, Weights
from tokenproxy.monitoring.exchange import queued

T = TypeVar("T")
log = logging.getLogger("tokenproxy")

FIRST_ANSWER_TIMEOUT_S = 30.0
_DISCOVERY_STEP_S = 0.05
QUEUE_REQUESTS = 16_384
"""How many requests may wait for a replica."""
QUEUE_TIMEOUT_S = 600.0
"""How long a request may wait: as long as clients do by default."""


class Fleet:
    """Replicas of one model."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        choose: Choose = sticky_least_loaded,
        replica_requests: int = 0,
        queue_requests: int = QUEUE_REQUESTS,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        watch_interval_s: float = 5.0,
        weight_update_timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A fleet that is not watched yet.

        Args:
            replica_requests: how many may run on each replica, others wait in a fair queue; 0 for no limit.
            queue_requests: how many may wait.
            queue_timeout_s: how long each may wait.
            watch_interval_s: seconds between two looks at the weights of the replicas.
            weight_update_timeout_s: how long an admin call may take on a replica.
            clock: the time that the event loop's own waits follow.
        """
        self.clock = clock
        self.replicas: list[Replica] = []
        self.model: FleetModel | None = None
        """The model that it serves; None before the first replica responds."""
        self.watch_interval_s = watch_interval_s
        self.weights = Weights(self, weight_update_timeout_s)
        self.leaving: list[Replica] = []
        """Removed replicas on which requests still run."""
        self._replica_requests = replica_requests or math.inf
        self.queue: FairQueue[Place] = FairQueue(
            queue_requests, queue_timeout_s, lambda place: self.ended(*place), self.weights.hold, clock
        )
        self.conversations = Conversations(clock=clock)
        self.prefix_caches = PrefixCaches(self)
        self.suspects = Suspects(clock)
        self.expected_ids = 200.0
        """Mean number of ids in a completion, of late."""
        self._choose = choose
        self.watch = FleetWatch(self)
        self._next = 0
        self._started = False
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Add a replica; it gets requests once it was discovered and its weights are those of the fleet."""
        self.replicas.append(replica)
        replica.fleet = self
        if self._started:
            replica.start()

    def remove(self, replica: Replica) -> None:
        """Remove a replica; requests that run on it end normally, and it is watched until they have."""
        if replica not in self.replicas:
            return
        self.replicas.remove(replica)
        self.leaving.append(replica)
        self.settle_model()

    async def forget(self, replica: Replica) -> None:
        """Stop watching a removed replica and close its connections: its last request ended."""
        self.leaving.remove(replica)
        await replica.stop()
        if all(other.name != replica.name for other in self.replicas):
            replica.forget_state()

    def settle_model(self) -> None:
        """Decide which model the fleet serves, and which replicas differ from it and get no requests.

        Call it after a replica begins or ceases to respond, is drained, or leaves.
        """
        usable = [replica for replica in self.replicas if replica.responds and not replica.draining]
        earlier, model = self.model, choose_model(self.model, usable)
        self.model = model
        if model is not earlier:
            log.info("the fleet serves a model with %s", model)
        for replica in self.replicas:
            difference = model.difference(replica) if model is not None and replica.responds else ""
            if difference and difference != replica.difference:
                log.warning("%s gets no requests: %s", replica.name, difference)
            replica.difference = difference
            replica.report_state()

    async def served_model(self) -> FleetModel:
        """The model that the fleet serves, once a replica is ready.

        Raises:
            EngineUnavailable: no replica responds.
        """
        usable = await self._usable(samples=False)
        if not usable or self.model is None:
            raise self.nothing_responds()
        return self.model

    def start(self) -> None:
        """Start watching all replicas."""
        self._started = True
        self.watch.start()
        self.weights.start()
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        await self.weights.stop()
        await self.watch.stop()
        for replica in [*self.replicas, *self.leaving]:
            await replica.stop()

    async def wait_discovered(self) -> None:
        """Wait until one replica is ready, discovery was tried on all, or `FIRST_ANSWER_TIMEOUT_S` passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
                while not self._is_discovered():  # noqa: ASYNC110 - seldom: requests come after the start
                    await asyncio.sleep(_DISCOVERY_STEP_S)

    def _is_discovered(self) -> bool:
        ready = any(replica.ready for replica in self.replicas)
        return ready or all(replica.was_tried for replica in self.replicas)

    async def send(self, work: Work, routing: Routing) -> Response:
        """Send a request to the replica that the policy chooses, and to another one if that fails.

        The response counts as running until it is closed. Its beginning was read, see `dispatch.py`. The
        chunks of an event stream end where events end.

        Args:
            work: sends the request to a replica and returns the response.

        Raises:
            EngineUnavailable: no replica responds.
            Overloaded: too many requests wait for a replica, or this one waited for too long.
            EngineTimeout: no replica accepted a connection in time, or one did not answer in time.
            EngineBroken: a replica broke under the request, and it may not run again.
        """
        return await Dispatch(self, routing, work).run()

    async def send_to_any(self, request: Request, routing: Routing) -> Response:
        """Send a request to a ready replica; if none is, to one that refuses discovery without a credential.

        Raises: as `send`.
        """
        need_credential = [replica for replica in self.replicas if replica.wants_credential]
        if need_credential and not any(replica.ready for replica in self.replicas):
            return await need_credential[0].engine.send(request)
        return await self.send(lambda replica: replica.engine.send(request), routing)

    def named(self, name: str) -> Replica:
        """The replica of that name.

        Raises:
            NotFound: there is none.
        """
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise NotFound(f"no replica at {name}: GET /admin/replicas lists them", param="x-replica")

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Repeat discovery with a client's accepted credential on the replicas that refuse it without one."""
        for replica in self.replicas:
            await replica.lend_credential(credential)

    async def ask(self, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Run `work` on a ready replica, whichever; if that accepts no connection, on the next one.

        For what is short and the same everywhere: rendering, questions about the model.

        Raises: as `send`.
        """
        ready = await self._usable(samples=False)
        self._next += 1
        start = self._next % max(1, len(ready))
        last: EngineTimeout | EngineBroken | None = None
        for replica in [*ready[start:], *ready[:start]]:
            try:
                return await work(replica)
            except EngineUnavailable as error:
                replica.mark_down(error)
            except (EngineTimeout, EngineBroken) as error:
                self.failed(replica, error)
                if isinstance(error, EngineBroken) and isinstance(last, EngineBroken):
                    raise
                last = error
        raise last or self.nothing_responds()

    async def place(self, routing: Routing) -> Place:
        """A place for a request on the replica that the policy chooses, waited for in the fair queue.

        Raises:
            EngineUnavailable: no replica responds.
            Overloaded: too many requests wait, or this one waited for too long.
        """
        held = self.weights.hold
        if not (held.active and routing.samples):
            await self._usable(samples=routing.samples)  # the first discovery may still run

        def take() -> Place | None:
            if held.active and routing.samples:
                return None
            usable = _in_service(self.taking(samples=routing.samples))
            if not usable:
                raise self.nothing_responds()
            free = [replica for replica in usable if replica.load.requests < self._replica_requests]
            if not free and held.active:
                free = usable  # the requests that run are paused, so that no place becomes free
            return _leased(self._chosen(free, routing), routing) if free else None

        overtakes = not self.queue.waiting or (held.active and not routing.samples)
        if overtakes and (place := take()) is not None:
            return place
        with queued():
            return await self.queue.acquire(routing.tenant, routing.ids, take)

    def next_place(self, routing: Routing, tried: Sequence[Replica]) -> Place | None:
        """A place on the least loaded replica that was not tried; None if there is none.

        It may exceed `replica_requests`.
        """
        others = [replica for replica in self.taking(samples=routing.samples) if replica not in tried]
        if not others:
            return None
        return _leased(min(others, key=lambda each: (not each.breaker.allows, each.load.requests)), routing)

    def _chosen(self, replicas: Sequence[Replica], routing: Routing) -> Replica:
        """The replica that the policy chooses."""
        if len(replicas) == 1:
            return replicas[0]
        holder = self.prefix_caches.holder(routing)
        candidates = [
            Candidate(
                replica.name,
                replica.load.requests,
                self.conversations.load(replica.name, routing.conversation),
                replica.load.pace_s,
                0.0 if replica.load.requests else replica.load.pace_age_s,
                work_of(self.expected_ids, routing.ids - (routing.reused if replica.name == holder else 0)),
            )
            for replica in replicas
        ]
        chosen = self._choose(candidates, holder)
        return next(replica for replica in replicas if replica.name == chosen.name)

    def ended(self, replica: Replica, lease: Lease) -> None:
        """A request no longer runs on a replica: one that waits may have its place."""
        replica.load.end(lease)
        replica.breaker.ended(lease)
        if self.queue.waiting:
            self.queue.wake()

    def failed(self, replica: Replica, problem: ApiError) -> None:
        """A request failed on a replica, for a reason that may lie in the replica."""
        replica.check_now()
        if not replica.ready:
            return
        if isinstance(problem, EngineTimeout) and self.watch.was_late:
            log.warning("%s is not blamed for a timeout: this process was busy", replica.name)
        elif replica.breaker.failed(problem.message, may_open=self.has_alternative(replica)):
            self._count_ejection(replica, "failures")

    def eject(self, replica: Replica, reason: str) -> None:
        """Send no requests to a replica for a while, and let those that wait for an answer go elsewhere."""
        replica.breaker.open(reason)
        self._count_ejection(replica, "silent")
        replica.load.give_up(asyncio.get_running_loop().time(), gone=False)

    def _count_ejection(self, replica: Replica, kind: str) -> None:
        breaker = replica.breaker
        log.warning("%s gets no requests for %.0f s: %s", replica.name, breaker.opens_for_s(), breaker.reason)
        replica.count_ejection(kind)

    def has_alternative(self, replica: Replica) -> bool:
        """Whether another replica could take the requests of one; a trial is too little for that."""
        others = [other for other in self.taking() if other is not replica]
        return any(other.breaker.state is BreakerState.CLOSED for other in others)

    def nothing_responds(self) -> EngineUnavailable:
        """The error where no replica responds that can serve a request."""
        problems = [str(problem) for report in self.report() if (problem := report.get("problem"))]
        return EngineUnavailable(f"no engine responds: {'; '.join(problems)}")

    def report(self) -> list[dict[str, Any]]:
        """The state of every replica, as `GET /ready` returns it."""
        return [
            report(replica) | {"conversations": self.conversations.count(replica.name)}
            for replica in self.replicas
        ]

    def taking(self, *, samples: bool = True) -> list[Replica]:
        """The replicas that take requests. Those with other weights take requests that do not sample."""
        responding = [replica for replica in self.replicas if replica.ready and not replica.draining]
        serving = [replica for replica in responding if self.weights.serves(replica)]
        return serving if samples or serving else responding

    async def _usable(self, *, samples: bool = True) -> list[Replica]:
        """The replicas that may get a request; those with an open breaker only if there are no others.

        Waits until the first discovery of all of them ended.
        """
        if not (ready := self.taking(samples=samples)):
            with queued():
                await self.wait_discovered()
            ready = self.taking(samples=samples)
        return _in_service(ready)


def _in_service(replicas: list[Replica]) -> list[Replica]:
    """Those of some replicas whose breaker lets requests through; all of them if none does."""
    return [replica for replica in replicas if replica.breaker.allows] or replicas


def _leased(replica: Replica, routing: Routing) -> Place:
    """Count a request as running on a replica."""
    lease = replica.load.begin(routing.ids)
    replica.breaker.started(lease)  # at once: the next in the queue must not be a second trial
    return replica, lease
