"""Runs one admin call on all replicas: what it changes in each request, and what the proxy learns from it.

1. The state that other processes have is read.
2. The request of each replica is made: see `admin_requests.py`.
3. New requests wait if the call starts a pause or an update. Other processes learn of it before the engines.
4. All replicas get their request at the same moment.
5. The state follows from the answers: the version, the end of a pause, replicas that leave service.
"""

import asyncio
import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from proxy.errors import BadRequest, EngineUnavailable
from proxy.fleet.admin_calls import AdminCall, Effect
from proxy.fleet.admin_requests import (
    AdminRequests,
    adapter_to_unload,
    cleared_by,
    named_version,
)
from proxy.fleet.fan_out import Outcome, fan_out
from proxy.fleet.fleet import Fleet
from proxy.fleet.joined_answers import join_answers, judged, problem_of
from proxy.fleet.replica import Replica
from proxy.fleet.shared import Failure, FleetState
from proxy.http import JSON_HEADERS, Request, Response, query_value
from proxy.metrics import Metrics

log = logging.getLogger("tokenproxy")

_OTHERS_LEARN_S = 0.15
"""Seconds from the announcement that a pause ends until the engines are resumed.

Other processes read the state three times in it, and note the positions of their streams. It is a time and no
event, because they share nothing but the store, and how many there are is unknown. One that reads too late
records its running turns as uncertain."""
_UPDATES = frozenset({Effect.START, Effect.LOAD, Effect.FINISH, Effect.NAME})
_LOADS = frozenset({Effect.START, Effect.LOAD, Effect.FINISH, Effect.CALL})
"""Effects after which a replica on which the call failed may have other weights than its version says."""
_MISSED = frozenset({Effect.START, Effect.LOAD, Effect.FINISH})
"""Effects that a replica must not miss."""
_BEGINS_REPAIR = "/start_weight_update"
_PAUSES = frozenset({Effect.PAUSE, Effect.SLEEP})
_ENDS_PAUSE = frozenset({Effect.RESUME, Effect.WAKE})


@dataclass(frozen=True, slots=True)
class _Run:
    """One call."""

    call: AdminCall
    request: Request
    only: str
    targets: list[Replica]
    version: str | None
    """The version that it sets."""
    unnamed: set[Replica]
    """Replicas that must not get the version."""
    in_update: bool
    """Whether the call is a step of an update that an earlier call started."""


class WeightCalls:
    """Runs the admin calls of a fleet."""

    def __init__(self, fleet: Fleet, metrics: Metrics, *, salted: bool = False) -> None:
        """`salted`: whether cached prefixes belong to one version, so that another one cannot use them."""
        self._salted = salted
        self._fleet = fleet
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
            EngineBroken, EngineTimeout: the world sizes of the replicas could not be found out.
        """
        task = asyncio.create_task(self._run(call, request, only))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        """Cancel the calls that run."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: "asyncio.Task[Response]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: its client may have left

    async def _run(self, call: AdminCall, request: Request, only: str) -> Response:
        weights = self._fleet.weights
        await weights.refresh()
        weights.calls += 1
        try:
            run = self._planned(call, request, only)
            requests = await AdminRequests(call, request, weights).make(run.targets, run.version, run.unnamed)
            await self._before(run)
            outcomes = await fan_out(requests, weights.timeout_s)
            outcomes = [judged(call, outcome) for outcome in outcomes]
            note = await self._after(run, outcomes)
        finally:
            weights.calls -= 1
        self._count(call, outcomes)
        return join_answers(call, outcomes, note)

    def _planned(self, call: AdminCall, request: Request, only: str) -> _Run:
        """The replicas of a call, and the version that it sets."""
        targets = self._targets(call, only)
        version = named_version(call, request)
        if call.effect is Effect.FINISH and version is None and not only:
            version = unnamed_version()
        unnamed = set() if only else self._not_to_be_named(targets)
        return _Run(call, request, only, targets, version, unnamed, bool(self._fleet.weights.state.updating))

    def _targets(self, call: AdminCall, only: str) -> list[Replica]:
        """The replicas that a call is sent to, in the order of the fleet."""
        replicas = self._fleet.replicas
        if only:
            return [self._fleet.named(only)]
        group = self._fleet.weights.state.group
        if call.effect in (Effect.START, Effect.LOAD, Effect.FINISH, Effect.LEAVE) and group:
            replicas = [replica for replica in replicas if replica.name in group]
        ready = [replica for replica in replicas if replica.ready]
        if not ready:
            raise EngineUnavailable(f"no replica can be reached for {call.path}")
        if call.effect is Effect.NAME:
            ready = self._may_be_named(ready)
        left_out = [replica.name for replica in self._fleet.replicas if replica not in ready]
        if left_out and call.method != "GET":
            log.warning("%s is not sent to %s", call.path, ", ".join(left_out))
        return ready

    def _may_be_named(self, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas that may get a new version. Raises BadRequest if there is none."""
        unnamed = self._not_to_be_named(replicas)
        named = [replica for replica in replicas if replica not in unnamed]
        if not named:
            raise BadRequest(
                "an update failed on every replica: update their weights, or send this call to one of them "
                "(header X-Replica) if you know that its weights are right",
                param="new_version",
            )
        return named

    def _not_to_be_named(self, replicas: Sequence[Replica]) -> set[Replica]:
        """The replicas on which an update failed: a new version must not be theirs."""
        failures = self._fleet.weights.state.failures
        return {
            replica
            for replica in replicas
            if (failure := failures.get(replica.name)) is not None
            and failure.loading
            and not failure.repairing
        }

    async def _before(self, run: _Run) -> None:
        """Hold new requests back, or prepare their release."""
        weights, effect = self._fleet.weights, run.call.effect
        state = weights.state
        if run.only:
            if effect in _UPDATES:
                for replica in run.targets:
                    weights.changing(replica)
        elif effect in _PAUSES:
            mode = "sleep" if effect is Effect.SLEEP else query_value(run.request, "mode", "abort")
            await weights.change(replace(state, paused=mode))
        elif effect in _UPDATES:
            updating = state.updating or run.call.path
            await weights.change(replace(state, updating=updating, touched=time.time()))
        elif effect in _ENDS_PAUSE:
            # before the others learn of it: they send requests to the engines from then on
            if state.paused and weights.shared:
                # other processes note the positions of their streams; new requests still wait here
                await weights.announce(replace(state, paused=""))
                await asyncio.sleep(_OTHERS_LEARN_S)
            weights.note_positions(late=self._fleet.lateness.was_late)

    async def _after(self, run: _Run, outcomes: Sequence[Outcome]) -> str:
        """Draw the consequences; returns a note for the client on what the proxy did."""
        weights, fleet, effect = self._fleet.weights, self._fleet, run.call.effect
        done = [outcome.replica for outcome in outcomes if outcome.ok]
        state = weights.state
        if run.version is not None:
            state = self._name(state, run, outcomes)
        state = self._failed(state, run, outcomes)
        state = self._repaired(state, run, done)
        if effect in _ENDS_PAUSE:
            state = self._resumed(state, run, outcomes)
        elif not run.only:
            state = _progressed(state, run, done)
        if state != weights.state or weights.announced:
            await weights.change(state)
        if cleared_by(run.call, run.request):
            for replica in done:
                fleet.prefix_caches.forget(replica)
        for replica in fleet.replicas:
            replica.report_state()
        if effect is Effect.ADD_ADAPTER:
            return await self._undo_adapter(run.request, outcomes)
        return ""

    def _name(self, state: FleetState, run: _Run, outcomes: Sequence[Outcome]) -> FleetState:
        """The state after replicas got a version. One that did not answer is asked for its own."""
        assert run.version is not None
        weights = self._fleet.weights
        done = [each.replica for each in outcomes if each.ok and each.replica not in run.unnamed]
        for replica in done:
            weights.named(replica, run.version)
            if self._salted:
                self._fleet.prefix_caches.forget(replica)
        unknown = [outcome.replica for outcome in outcomes if not outcome.ok and not outcome.refused]
        for replica in unknown:
            replica.weight_version = None
            weights.changing(replica)
        if unknown:
            weights.ask_again(unknown)  # before requests go on: without a version none is sent to them
        if not done or run.only:
            return state
        log.info("the weights of the fleet are version %s", run.version)
        return state.with_version(run.version)

    def _failed(self, state: FleetState, run: _Run, outcomes: Sequence[Outcome]) -> FleetState:
        """The state after some replicas failed: they leave service."""
        call = run.call
        failed = [outcome for outcome in outcomes if not outcome.ok]
        # where a version is all that is set, the version that a replica reports decides
        if not call.leaves or not failed or call.effect is Effect.NAME:
            return state
        loading = call.effect in _LOADS
        everywhere = len(failed) == len(outcomes)
        if everywhere and (all(each.refused for each in failed) or (loading and not run.in_update)):
            return state  # nothing was loaded anywhere
        # a failure counts from before the version that this call may have set
        revision = self._fleet.weights.state.revision
        failures = {}
        for outcome in failed:
            earlier = state.failures.get(outcome.replica.name)
            if earlier is not None and earlier.loading and not earlier.repairing:
                continue  # the steps after the one that failed fail, too
            reason = f"{call.path} failed on it: {problem_of(outcome)}"
            failures[outcome.replica.name] = Failure(call.path, reason, revision, loading)
            log.error("%s leaves service: %s", outcome.replica.name, reason)
            if loading:
                self._fleet.weights.changing(outcome.replica)
        return state.with_failures(failures)

    def _repaired(self, state: FleetState, run: _Run, done: Sequence[Replica]) -> FleetState:
        """The state after a call succeeded on replicas: on those that had failed, and without the others."""
        call = run.call
        failed = {each.name: state.failures[each.name] for each in done if each.name in state.failures}
        if call.effect in _MISSED and done and not run.only:
            state = state.with_failures(self._missed(state, run))
        if call.path == _BEGINS_REPAIR:
            begun = {name: replace(each, repairing=True) for name, each in failed.items() if each.loading}
            return state.with_failures(begun)
        healed = []
        for name, failure in failed.items():
            again = failure.path == call.path and call.effect in (Effect.CALL, *_ENDS_PAUSE)
            finished = call.effect is Effect.FINISH and failure.repairing
            stated = call.effect is Effect.NAME and bool(run.only)
            if again or finished or stated:
                healed.append(name)
                log.info("%s gets requests again: %s succeeded on it", name, call.path)
        return state.without_failures(healed) if healed else state

    def _missed(self, state: FleetState, run: _Run) -> dict[str, Failure]:
        """The failures of replicas that a step of an update was not sent to."""
        path, revision = run.call.path, self._fleet.weights.state.revision
        reason = f"it did not take part in {path}: update its weights"
        return {
            replica.name: Failure(path, reason, revision)
            for replica in self._fleet.replicas
            if replica not in run.targets and replica.name not in state.failures
        }

    def _resumed(self, state: FleetState, run: _Run, outcomes: Sequence[Outcome]) -> FleetState:
        """The state after replicas were resumed or woken up."""
        awake = [
            outcome.replica
            for outcome in outcomes
            if outcome.ok and (run.call.effect is Effect.RESUME or outcome.value("status") == "awake")
        ]
        for replica in awake:
            self._fleet.weights.resumed(replica)
        return replace(state, paused="") if awake and not run.only else state

    async def _undo_adapter(self, request: Request, outcomes: Sequence[Outcome]) -> str:
        """Unload an adapter that not all replicas could load: all of them have it, or none."""
        done = [outcome.replica for outcome in outcomes if outcome.ok]
        name = adapter_to_unload(request)
        if len(done) in (0, len(outcomes)):
            return ""
        if name is None:
            return "The replicas on which it succeeded have the adapter"
        unload = Request("POST", "/v1/unload_lora_adapter", [*JSON_HEADERS], name, fresh=True)
        undone = await fan_out(dict.fromkeys(done, unload), self._fleet.weights.timeout_s)
        left = [outcome.replica.name for outcome in undone if not outcome.ok]
        return f"The adapter stays on {', '.join(left)}" if left else "No replica has the adapter"

    def _count(self, call: AdminCall, outcomes: Sequence[Outcome]) -> None:
        succeeded = sum(outcome.ok for outcome in outcomes)
        result = "all" if succeeded == len(outcomes) else "some" if succeeded else "none"
        self._metrics.admin_calls.labels(call.path, result).inc()


def unnamed_version() -> str:
    """A name for a version that the trainer did not name: a replica that restarts must not look updated."""
    return f"update-{datetime.datetime.now(datetime.UTC).isoformat(timespec='milliseconds')}"


def _progressed(state: FleetState, run: _Run, done: Sequence[Replica]) -> FleetState:
    """The state after a call on the whole fleet, as far as pauses, updates and the trainer's group go."""
    match run.call.effect:
        case Effect.FINISH:
            return replace(state, updating="")
        case Effect.NAME if not run.in_update:
            return replace(state, updating="")
        case Effect.START | Effect.LOAD if not done and not run.in_update:
            return replace(state, updating="")
        case Effect.PAUSE | Effect.SLEEP if not done:
            return replace(state, paused="")
        case Effect.JOIN:
            return replace(state, group=tuple(replica.name for replica in done))
        case Effect.LEAVE if done:
            return replace(state, group=())
    return state
