"""All engines of the proxy: which one serves a request, and what happens if it fails."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tokenproxy.base.errors import (
    ApiError,
    EngineBroken,
    EngineTimeout,
    EngineUnavailable,
    NotFound,
    Overloaded,
)
from tokenproxy.base.http import Request, Response
from tokenproxy.engine.discovery import NO_TOKEN_IN
from tokenproxy.fleet import dispatch
from tokenproxy.fleet.admission import Admission, Conversations
from tokenproxy.fleet.choosing import Choose, PrefixCaches, Routing, sticky_least_loaded
from tokenproxy.fleet.dispatch import Run, Suspects
from tokenproxy.fleet.health import FleetWatch
from tokenproxy.fleet.load import BreakerState
from tokenproxy.fleet.model import FleetModel, choose_model
from tokenproxy.fleet.queue import FairQueue, Priority
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weights import TIMEOUT_S, Weights
from tokenproxy.monitoring.exchange import queued

T = TypeVar("T")
log = logging.getLogger("tokenproxy")

FIRST_ANSWER_TIMEOUT_S = 30.0
_DISCOVERY_STEP_S = 0.05
QUEUE_REQUESTS = 16_384
"""How many requests may wait for a replica."""
ADMISSION_WAIT_S = 120.0
"""How long a conversation may wait for room in a cache: some agents give up after 300 s of silence."""
QUEUE_TIMEOUT_S = 600.0
"""How long a request may wait: as long as clients do by default."""


class Fleet:
    """Replicas of one model."""

    send = dispatch.send

    def __init__(
        self,
        replicas: Sequence[Replica],
        choose: Choose = sticky_least_loaded,
        replica_requests: int = 0,
        queue_requests: int = QUEUE_REQUESTS,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        watch_interval_s: float = 5.0,
        weight_update_timeout_s: float = TIMEOUT_S,
        admission_wait_s: float = ADMISSION_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A fleet that is not watched yet.

        Args:
            replica_requests: how many may run on each replica, others wait in a fair queue; 0 for no limit.
            queue_requests: how many may wait.
            queue_timeout_s: how long each may wait.
            watch_interval_s: seconds between two looks at the weights of the replicas.
            weight_update_timeout_s: how long an admin call may take on a replica.
            admission_wait_s: how long a conversation may wait for room in a cache, all its turns together; 0
                lets none wait.
            clock: the time that the event loop's own waits follow.
        """
        self.clock = clock
        self.replicas: list[Replica] = []
        self.ready: list[Replica] = []
        """Those that respond, do not differ from the model, and are not drained; see `settle_model`."""
        self.model: FleetModel | None = None
        """The model that it serves; None before the first replica responds."""
        self.watch_interval_s = watch_interval_s
        self.weights = Weights(self, weight_update_timeout_s)
        self.leaving: list[Replica] = []
        """Removed replicas on which requests still run."""
        self._replica_requests = replica_requests or math.inf
        self.admission_wait_s = admission_wait_s
        self.queue: FairQueue[Run] = FairQueue(
            queue_requests, queue_timeout_s, Run.end, self.weights.suspension, clock, self._room
        )
        self.conversations = Conversations(clock=clock)
        self.prefix_caches = PrefixCaches()
        self.suspects = Suspects(clock)
        self._choose = choose
        self.watch = FleetWatch(self)
        self._started = self._all_tried = False
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
        self.replicas.remove(replica)
        self.leaving.append(replica)
        self.settle_model()

    async def forget(self, replica: Replica) -> None:
        """Stop watching a removed replica and close its connections: its last request ended."""
        self.leaving.remove(replica)
        await replica.stop()
        if all(other.name != replica.name for other in self.replicas):
            replica.metrics.replica_removed(replica.name)

    def settle_model(self) -> None:
        """Decide which model the fleet serves, and which replicas differ from it and get no requests.

        Call it after a replica begins or ceases to respond, is drained, or leaves. Until all replicas of the
        start were asked, the decision is not final: a wrong replica may be the first that responds.
        """
        usable = [replica for replica in self.replicas if replica.responds and not replica.draining]
        earlier, model = self.model, choose_model(self.model if self._all_tried else None, usable)
        self._all_tried = self._all_tried or all(replica.was_tried for replica in self.replicas)
        self.model = model
        if model is not None and str(model) != str(earlier):
            log.info("the fleet serves a model with %s", model)
        for replica in self.replicas:
            difference = model.difference(replica) if model is not None and replica.responds else ""
            if difference and difference != replica.difference:
                log.warning("%s gets no requests: %s", replica.name, difference)
            replica.difference = difference
            replica.report_state()
        self.ready = [replica for replica in self.replicas if replica.ready and not replica.draining]

    async def served_model(self) -> FleetModel:
        """The model that the fleet serves, once a replica is ready.

        Raises:
            EngineUnavailable: no replica responds.
        """
        if not self.ready:
            await self._first_answer()
        if not self.ready or self.model is None:
            raise self.nothing_responds()
        return self.model

    def start(self) -> None:
        """Start watching all replicas."""
        self._started = True
        self.watch.start()
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        await self.watch.stop()
        for replica in [*self.replicas, *self.leaving]:
            await replica.stop()

    async def send_to_any(self, request: Request, routing: Routing) -> Response:
        """Send a request to a ready replica; if none is, to one that refuses discovery without a credential.

        Raises: as `send`.
        """

        async def work(replica: Replica) -> Response:
            return await replica.engine.send(request)

        need_credential = [replica for replica in self.replicas if replica.wants_credential]
        if need_credential and not any(replica.ready for replica in self.replicas):
            return await Run(self, need_credential[0], routing).attempt(work, last_try=True)
        return await self.send(work, routing)

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
        await self.served_model()
        ready = _in_service(self.taking(samples=False))
        last: EngineTimeout | EngineBroken | None = None
        for replica in random.sample(ready, len(ready)):
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

    async def acquire(self, routing: Routing) -> Run:
        """Count a request as running on the replica that the policy chooses, after its wait in the queue.

        Raises:
            EngineUnavailable: no replica responds.
            Overloaded: too many requests wait, or this one waited for too long.
        """
        suspension = self.weights.suspension
        if self.weights.outdated and routing.samples:
            await self.weights.refresh()
        if not self.ready and not (suspension.active and routing.samples):
            await self._first_answer()
        admission = Admission(self, routing)

        def take() -> Run | None:
            if suspension.active and routing.samples:
                return None
            usable = self._fitting(routing)
            if not usable:
                raise self.nothing_responds()
            free = self._free(usable)
            if not free and suspension.active:
                free = usable  # the requests that run are paused, so that none ends
            free = admission.with_room(free)
            return Run(self, self._chosen(free, routing), routing, admission.conversation) if free else None

        priority = admission.priority
        waits = self.queue.waiting and self.queue.must_wait(priority)
        overtakes = suspension.active and not routing.samples
        if (overtakes or not waits) and (run := take()) is not None:
            return run
        for_room = priority is not Priority.ADMITTED
        with queued(for_room=for_room), self.conversations.waiting(routing.conversation):
            if for_room:
                with suppress(Overloaded):
                    return await self.queue.acquire(
                        routing.tenant, take, priority, admission.wait_s, admission.lack
                    )
                admission.priority = Priority.ADMITTED  # it waited for as long as it may
            return await self.queue.acquire(routing.tenant, take)

    def _free(self, replicas: list[Replica]) -> list[Replica]:
        """Those of some replicas on which more requests may run."""
        if self._replica_requests == math.inf:
            return replicas
        return [replica for replica in replicas if replica.load.requests < self._replica_requests]

    def _room(self) -> float:
        """The most ids that are free for a conversation which waits; infinite if no replica takes any."""
        before = self.conversations.idle_before()
        taking = self._free(_in_service(self.taking()))
        return max((replica.cache.room(lambda: before) for replica in taking), default=math.inf)

    def next_run(self, routing: Routing, tried: Sequence[Replica]) -> Run | None:
        """Count a request as running on the least loaded replica that was not tried; None if there is none.

        It may exceed `replica_requests`.
        """
        others = self._fitting(routing, tried)
        return Run(self, min(others, key=lambda each: each.load.requests), routing) if others else None

    def _fitting(self, routing: Routing, tried: Sequence[Replica] = ()) -> list[Replica]:
        """The replicas that may get a request: of those that lack nothing for it, or of all if each does."""
        usable = self.taking(samples=routing.samples)
        if tried:
            usable = [replica for replica in usable if replica not in tried]
        if len(usable) > 1:
            usable = _in_service(usable)
            usable = [replica for replica in usable if not replica.lacks(routing.model)] or usable
        return usable

    def _chosen(self, replicas: Sequence[Replica], routing: Routing) -> Replica:
        """The replica that the policy chooses."""
        if len(replicas) == 1:
            return replicas[0]
        active = self.conversations.find(routing.conversation)
        holder = active.replica if active is not None else routing.holder
        if not holder and routing.prompts:
            served = self.prefix_caches.find(routing.prompts[0])
            holders = [replica for replica in replicas if replica.name in served]
            holder = min(holders, key=lambda each: each.load.requests).name if holders else ""
        return self._choose(replicas, holder, self.conversations.count)

    def did_worse(self, replica: Replica, response: Response, routing: Routing) -> None:
        """Take note that another replica served a request which got an error response from this one."""
        if response.status != 404:
            self.failed(replica, EngineBroken(f"{replica.name} answered {response.status}"))
        else:
            log.warning("%s lacks the model %s, which another replica serves", replica.name, routing.model)
            replica.note_lack(routing.model)

    def failed(self, replica: Replica, problem: ApiError) -> None:
        """A request failed on a replica, for a reason that may lie in the replica."""
        replica.check_due.set()
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
        replica.metrics.replica_ejected(replica.name, kind)
        replica.report_state()

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
            _report(replica) | {"conversations": self.conversations.count(replica.name)}
            for replica in self.replicas
        ]

    def taking(self, *, samples: bool = True) -> list[Replica]:
        """The replicas that take requests. Those with other weights take requests that do not sample."""
        state = self.weights.state
        serving = [each for each in self.ready if not state.problem(each.name, each.weight_version)]
        return serving if samples or serving else self.ready

    async def _first_answer(self) -> None:
        """Wait until a replica is ready, discovery was tried on all, or `FIRST_ANSWER_TIMEOUT_S` passed."""
        end = self.clock() + FIRST_ANSWER_TIMEOUT_S
        with queued():  # seldom: requests come after the start
            while not any(each.ready for each in self.replicas) and self.clock() < end:
                if all(each.was_tried for each in self.replicas):
                    break
                await asyncio.sleep(_DISCOVERY_STEP_S)


def _in_service(replicas: list[Replica]) -> list[Replica]:
    """Those of some replicas whose breaker lets requests through; all of them if none does."""
    return [replica for replica in replicas if replica.breaker.allows] or replicas


def _report(replica: Replica) -> dict[str, Any]:
    """A replica's part of `GET /ready`."""
    capabilities, tokenizer, breaker = replica.capabilities, replica.tokenizer, replica.breaker
    facts = {"engine": replica.name, "draining": replica.draining, "requests": replica.load.requests}
    if capabilities is None:
        return facts | {"ready": False, "problem": replica.problem}
    differs = problem = replica.difference or replica.fleet.weights.problem(replica)
    if not problem and breaker.opens_for_s():
        problem = f"no requests for {breaker.opens_for_s():.0f} s: {breaker.reason}"
    elif not problem and capabilities.token_in is None:
        problem = NO_TOKEN_IN
    facts |= {
        "ready": not differs,
        "version": capabilities.version,
        "model": capabilities.model.name if capabilities.model else None,
        "token_in": capabilities.token_in.name if capabilities.token_in else None,
        "logprobs_mode": capabilities.logprobs_mode or "unknown",
        "breaker": breaker.state,
    }
    optional = {
        "weight_version": replica.weight_version,
        "problem": problem or None,
        "warning": capabilities.logprobs_warning or None,
    }
    facts |= {name: value for name, value in optional.items() if value is not None}
    if tokenizer is None:
        return facts | {"append": str(replica.tokenizer_problem)}
    proof, cache = tokenizer.proof, tokenizer.cache_info()
    template = {}  # empty until the template was examined
    if proof is not None:
        template = {
            "after_messages": str(proof.after_messages),
            "after_results": str(proof.after_results),
            "reason": proof.reason,
        }
    counts = {"hits": cache.hits, "misses": cache.misses}
    return facts | {"append": "ready", "template": template, "append_cache": counts}
