"""Runs one admin call on all replicas: what it changes in each request, and what the proxy learns from it.

1. The state that other processes have is read.
2. The request of each replica is made: see `admin_calls.py`.
3. New requests wait if the call starts a pause or an update. Other processes learn of it before the engines.
4. All replicas get their request at the same moment.
5. The state is read again, and changes by the answers: the version, the end of a pause, replicas that leave
   service.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Sequence

from msgspec.structs import replace

from tokenproxy.base.errors import BadRequest, EngineUnavailable
from tokenproxy.base.http import JSON_HEADERS, Request, Response, query_value
from tokenproxy.base.tasks import end_tasks
from tokenproxy.fleet.admin_calls import (
    AdminCall,
    Effect,
    Outcome,
    adapter_to_unload,
    fan_out,
    join_answers,
    make_requests,
    named_version,
)
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weight_state import Failure, FleetState
from tokenproxy.monitoring.metrics import Metrics

log = logging.getLogger("tokenproxy")

_OTHERS_LEARN_S = 0.15
"""Seconds from the announcement that a pause ends until the engines are resumed.

Other processes read the state three times in it, and note the positions of their streams. It is a time and no
event, because they share nothing but the store, and how many there are is unknown. One that reads too late
records its running turns as uncertain."""
_STEPS = frozenset({Effect.START, Effect.LOAD, Effect.FINISH})
"""The steps of an update, which a replica must not miss."""
_UPDATES = _STEPS | {Effect.NAME}
_LOADS = _STEPS | {Effect.CALL}
"""Effects after which a replica on which the call failed may have other weights than its version says."""
_REPAIRS = "/start_weight_update"
"""An update of a draft model repairs nothing."""
_PAUSES = frozenset({Effect.PAUSE, Effect.SLEEP})
_ENDS_PAUSE = frozenset({Effect.RESUME, Effect.WAKE})


class WeightCalls:
    """Runs the admin calls of a fleet."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self.fleet = fleet
        self._metrics = metrics
        self._running: set[asyncio.Task[Response]] = set()

    async def run(self, call: AdminCall, request: Request, only: str = "") -> Response:
        """The answer of all replicas, joined. The call continues if the client leaves.

        Args:
            only: name of the one replica to send it to; empty for all.

        Raises:
            BadRequest: the body is not what the call needs; nothing was sent.
            NotFound: no replica has the name `only`.
            EngineUnavailable: no replica can be reached.
            EngineBroken: the world sizes of the replicas could not be found out.
        """
        task = asyncio.create_task(self._run(call, request, only))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        """Cancel the calls that run."""
        await end_tasks(*self._running)

    def _ended(self, task: "asyncio.Task[Response]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its client may have left

    async def _run(self, call: AdminCall, request: Request, only: str) -> Response:
        weights = self.fleet.weights
        await weights.refresh()
        weights.calls += 1
        try:
            running = _Call(self.fleet, call, request, only)
            requests = await make_requests(call, request, running.targets, running.version, running.unnamed)
            await running.prepare()
            outcomes = await fan_out(requests, weights.timeout_s)
            await weights.refresh()
            note = await running.conclude(outcomes)
        finally:
            weights.calls -= 1
        succeeded = sum(outcome.ok for outcome in outcomes)
        result = "all" if succeeded == len(outcomes) else "some" if succeeded else "none"
        self._metrics.admin_calls.labels(call.path, result).inc()
        return join_answers(call, outcomes, note)


class _Call:
    """One call."""

    def __init__(self, fleet: Fleet, call: AdminCall, request: Request, only: str) -> None:
        """Raises BadRequest, NotFound or EngineUnavailable, as `WeightCalls.run`."""
        self._fleet = fleet
        self._weights = fleet.weights
        self._call = call
        self._request = request
        self._only = only
        state = self._weights.state
        self._in_update = bool(state.updating)
        """Whether the call is a step of an update that an earlier call started."""
        failed = {each for each in self._fleet.replicas if state.lacks_weights(each.name)}
        self.unnamed: set[Replica] = set() if only else failed
        """Replicas on which an update failed: a new version must not be theirs."""
        self.version = named_version(call, request)
        """The version that it sets."""
        if call.effect is Effect.FINISH and self.version is None and not only:
            # a replica that restarts must not look updated
            now = datetime.datetime.now(datetime.UTC)
            self.version = f"update-{now.isoformat(timespec='milliseconds')}"
        self.targets = [self._fleet.named(only)] if only else self._all_targets()

    def _all_targets(self) -> list[Replica]:
        """The replicas that a call is sent to, in the order of the fleet."""
        call, group = self._call, self._weights.state.group
        ready = [replica for replica in self._fleet.replicas if replica.ready]
        if call.effect in _STEPS | {Effect.LEAVE} and group:
            ready = [replica for replica in ready if replica.name in group]
        if not ready:
            raise EngineUnavailable(f"no replica can be reached for {call.path}")
        if call.effect is Effect.NAME:
            ready = [replica for replica in ready if replica not in self.unnamed]
            if not ready:
                raise BadRequest(
                    "an update failed on every replica: update their weights, or send this call to one of "
                    "them (header X-Replica) if you know that its weights are right",
                    param="new_version",
                )
        left_out = [replica.name for replica in self._fleet.replicas if replica not in ready]
        if left_out and call.method != "GET":
            log.warning("%s is not sent to %s", call.path, ", ".join(left_out))
        return ready

    async def prepare(self) -> None:
        """Hold new requests back, or prepare their release."""
        weights, effect = self._weights, self._call.effect
        state = weights.state
        if effect is Effect.ABORT:
            await weights.change(replace(state, aborts=state.aborts + 1))
        elif self._only:
            if effect in _UPDATES:
                for replica in self.targets:
                    weights.changing(replica)
        elif effect in _PAUSES:
            mode = "sleep" if effect is Effect.SLEEP else query_value(self._request, "mode", "abort")
            await weights.change(replace(state, paused=mode))
        elif effect in _UPDATES:
            updating = state.updating or self._call.path
            await weights.change(replace(state, updating=updating, touched=time.time()))
        elif effect in _ENDS_PAUSE:
            # before other processes learn of it: they send requests to the engines from then on
            late = bool(state.paused) and not await self._fleet.watch.settled()
            if state.paused and weights.shared:
                # other processes note the positions of their streams; new requests still wait here
                await weights.change(replace(weights.state, paused=""), adopt=False)
                await asyncio.sleep(_OTHERS_LEARN_S)
            weights.note_positions(late=late)

    async def conclude(self, outcomes: Sequence[Outcome]) -> str:
        """Draw the consequences; returns a note for the client on what the proxy did."""
        weights, fleet, effect = self._weights, self._fleet, self._call.effect
        done = [outcome.replica for outcome in outcomes if outcome.ok]
        state = self._named(weights.state, outcomes)
        state = self._with_failures(state, outcomes)
        state = self._repaired(state, done)
        if effect in _ENDS_PAUSE:
            awake = [
                each.replica
                for each in outcomes
                if each.ok and (effect is Effect.RESUME or each.value("status") == "awake")
            ]
            for replica in awake:
                weights.resumed(replica)
            state = replace(state, paused="") if awake and not self._only else state
        elif not self._only:
            state = self._progressed(state, done)
        if state != weights.state or weights.ahead or weights.ends_pause:
            await weights.change(state)
        for replica in fleet.replicas:
            replica.report_state()
        return await self._undo_adapter(outcomes) if effect is Effect.ADD_ADAPTER else ""

    def _named(self, state: FleetState, outcomes: Sequence[Outcome]) -> FleetState:
        """The state after replicas got a version. One that did not answer is asked for its own."""
        if self.version is None:
            return state
        named = [each.replica for each in outcomes if each.ok and each.replica not in self.unnamed]
        for replica in named:
            self._weights.named(replica, self.version)
        unknown = [outcome.replica for outcome in outcomes if not outcome.ok and not outcome.refused]
        for replica in unknown:
            replica.weight_version = None
            self._weights.changing(replica)
        if unknown:
            self._weights.ask_again(unknown)  # before requests go on: without a version none is sent to them
        if not named or self._only:
            return state
        log.info("the weights of the fleet are version %s", self.version)
        return replace(state, version=self.version, revision=state.revision + 1)

    def _with_failures(self, state: FleetState, outcomes: Sequence[Outcome]) -> FleetState:
        """The state after some replicas failed, or were left out: they leave service."""
        call, failures = self._call, {}
        failed = [outcome for outcome in outcomes if not outcome.ok]
        everywhere = len(failed) == len(outcomes)
        if call.effect in _STEPS and not everywhere and not self._only:
            reason = f"it did not take part in {call.path}: update its weights"
            missed = [each.name for each in self._fleet.replicas if each not in self.targets]
            failures = {name: Failure(call.path, reason) for name in missed if name not in state.failures}
        # where a version is all that is set, the version that a replica reports decides
        if not call.leaves or call.effect is Effect.NAME:
            return state
        loading = call.effect in _LOADS
        if everywhere and (all(each.refused for each in failed) or (loading and not self._in_update)):
            return state  # nothing was loaded anywhere
        for outcome in failed:
            name = outcome.replica.name
            if state.lacks_weights(name):
                continue  # the steps after the one that failed fail, too
            failures[name] = Failure(call.path, f"{call.path} failed on it: {outcome.why()}", loading)
            log.error("%s leaves service: %s", name, failures[name].reason)
            if loading:
                self._weights.changing(outcome.replica)
        return replace(state, failures=state.failures | failures)

    def _repaired(self, state: FleetState, done: Sequence[Replica]) -> FleetState:
        """The state after a call succeeded on replicas that had failed."""
        call, failures = self._call, dict(state.failures)
        for name in [replica.name for replica in done if replica.name in failures]:
            failure = failures[name]
            again = failure.path == call.path and call.effect in (Effect.CALL, *_ENDS_PAUSE)
            stated = bool(self._only) and call.effect in (Effect.FINISH, Effect.NAME)
            # requests wait until that update has ended
            begun = call.path == _REPAIRS and failure.loading and not self._only
            if again or stated or begun:
                log.info("%s succeeded on %s, on which %s had failed", call.path, name, failure.path)
                del failures[name]
        return replace(state, failures=failures)

    def _progressed(self, state: FleetState, done: Sequence[Replica]) -> FleetState:
        """The state after a call on the whole fleet, as far as pauses, updates and the trainer's group go."""
        match self._call.effect:
            case Effect.FINISH:
                return replace(state, updating="")
            case Effect.NAME if not self._in_update:
                return replace(state, updating="")
            case Effect.START | Effect.LOAD if not done and not self._in_update:
                return replace(state, updating="")
            case Effect.PAUSE | Effect.SLEEP if not done:
                return replace(state, paused="")
            case Effect.JOIN:
                return replace(state, group=tuple(replica.name for replica in done))
            case Effect.LEAVE if done:
                return replace(state, group=())
        return state

    async def _undo_adapter(self, outcomes: Sequence[Outcome]) -> str:
        """Unload an adapter that not all replicas could load: all of them have it, or none."""
        done = [outcome.replica for outcome in outcomes if outcome.ok]
        name = adapter_to_unload(self._request)
        if len(done) in (0, len(outcomes)):
            return ""
        if name is None:
            return "The replicas on which it succeeded have the adapter"
        unload = Request("POST", "/v1/unload_lora_adapter", [*JSON_HEADERS], name, fresh=True)
        undone = await fan_out(dict.fromkeys(done, unload), self._weights.timeout_s)
        left = [outcome.replica.name for outcome in undone if not outcome.ok]
        return f"The adapter stays on {', '.join(left)}" if left else "No replica has the adapter"
