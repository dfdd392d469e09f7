"""Records sampled turns: converts a plan and a completion into turns in the store.

A failure here never affects the client's response: it is logged and counted, and the turn is not recorded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from weakref import WeakSet

from proxy.history.cache import TurnCache
from proxy.history.claims import Claims
from proxy.history.completion import Batch, Completion
from proxy.history.encoders import WORTH_A_THREAD_BYTES
from proxy.history.new_turns import NewTurn, new_turns
from proxy.history.plan import PromptPlan, prompt_of
from proxy.history.store import Store, StoreError
from proxy.history.tasks import Tasks
from proxy.history.turn import Turn
from proxy.metrics import Metrics
from proxy.monitoring.exchange import running_exchange, span

log = logging.getLogger("tokenproxy")

BeforeRecording = Callable[[Completion], Awaitable[None]]


class Recorder:
    """Records turns. One per application."""

    def __init__(
        self, store: Store, cache: TurnCache, executor: Executor, metrics: Metrics, tasks: Tasks
    ) -> None:
        self.store = store
        self.cache = cache
        self.executor = executor
        self.metrics = metrics
        self.tasks = tasks
        self._recordings: WeakSet[Recording] = WeakSet()

    def start(
        self, plan: PromptPlan, claims: Claims, before_recording: BeforeRecording | None = None
    ) -> "Recording":
        """The recording of one request's turns.

        Args:
            claims: those of the request: they hold the rollouts of the plan, and the claim of a prompt is
                kept when a turn of it was recorded.
            before_recording: adds evidence to a completion that does not come from its engine's answer.
        """
        recording = Recording(self, plan, claims, before_recording)
        self._recordings.add(recording)
        return recording

    def forget(self, rollout: str) -> None:
        """Remove a deleted rollout: drop its turns from the cache, and do not record its running requests."""
        self.cache.drop(rollout)
        for recording in self._recordings:
            recording.drop(rollout)


@dataclass(slots=True)
class _PromptRecord:
    """What was recorded for one prompt of a request."""

    plan: PromptPlan
    holder: Turn | None = None
    """The first turn that was recorded. It holds the prompt, which the other choices share."""
    dropped: bool = False
    """Whether its session was deleted meanwhile."""

    @property
    def rollout(self) -> str:
        return self.plan.placement.session.id


class Recording:
    """Records the turns of one request, as its choices end."""

    def __init__(
        self,
        recorder: Recorder,
        plan: PromptPlan,
        claims: Claims,
        before_recording: BeforeRecording | None,
    ) -> None:
        self._claims = claims
        self._before_recording = before_recording
        self.plan = plan
        self.replica = ""
        """Name of the replica that serves the turns; set before the first one is added."""
        self._recorder = recorder
        self._prompts = [_PromptRecord(prompt) for prompt in plan.prompts]
        for prompt in self._prompts:
            claims.hold(prompt.rollout)
        self._lock = asyncio.Lock()

    async def announce(self) -> None:
        """Create new rollouts before their first turns are complete, because the client now gets the name."""
        for prompt in self._prompts:
            placement = prompt.plan.placement
            if not placement.new_rollout or placement.conversation is None:
                continue
            try:
                await self._recorder.store.save_session(placement.session)
            except StoreError as error:
                consequence = f"rollout {placement.session.id} was not created before its first turn"
                error.report(self._recorder.metrics, consequence)

    def drop(self, rollout: str) -> None:
        """Record no more turns of a rollout, because it was deleted."""
        for prompt in self._prompts:
            prompt.dropped = prompt.dropped or prompt.rollout == rollout

    async def add(self, completion: Completion) -> None:
        """Record the choices of a completion. Other requests find them after this returns.

        If the caller is cancelled, the recording still completes.
        """
        if self.plan.placement.conversation is not None and completion.choices:
            await self._recorder.tasks.finish(self._add(completion))

    def add_later(self, completion: Completion) -> None:
        """Record choices that were broken off, in the background: their request is being cancelled."""
        if self.plan.placement.conversation is not None and completion.choices:
            self._recorder.tasks.finish_later(self._add(completion))

    async def _add(self, completion: Completion) -> None:
        async with self._lock:
            try:
                if self._before_recording is not None:
                    await self._before_recording(completion)
            except Exception:  # the boundary: a failure to record must not fail the response
                self._recorder.metrics.store_errors.inc()
                log.exception("the turns of a request could not be recorded")
                return
            with span("record", {}):
                for part in self._by_rollout(completion):
                    await self._add_to_rollout(part)

    def _by_rollout(self, completion: Completion) -> list[list[tuple[_PromptRecord, Completion]]]:
        """The prompts with new choices, each with its part of the completion, rollout by rollout."""
        if len(self._prompts) == 1 and completion.choices[0].prompt_ids is None:
            parts = {0: completion}  # of another route than completions
        else:
            batch = Batch(tuple(b"" for _ in self._prompts), self.plan.placement.choices)
            parts = completion.by_prompt(batch)
        by_rollout: dict[str, list[tuple[_PromptRecord, Completion]]] = {}
        for position, part in parts.items():
            prompt = self._prompts[position]
            by_rollout.setdefault(prompt.rollout, []).append((prompt, part))
        return list(by_rollout.values())

    async def _add_to_rollout(self, parts: list[tuple[_PromptRecord, Completion]]) -> None:
        rollout = parts[0][0].rollout
        if parts[0][0].dropped:
            log.info("a turn of %s is not recorded: its session was deleted", rollout)
            return
        try:
            await self._record(parts)
        except StoreError as error:
            self._recorder.metrics.store_errors.inc()
            log.error("a turn of %s was not recorded: %s", rollout, error)
        except Exception:  # the boundary: a failure to record must not fail the response
            self._recorder.metrics.store_errors.inc()
            log.exception("a turn of %s could not be recorded", rollout)

    async def _record(self, parts: list[tuple[_PromptRecord, Completion]]) -> None:
        recorder = self._recorder

        def make() -> list[list[NewTurn]]:
            return [new_turns(prompt.plan, part, prompt.holder, self.replica) for prompt, part in parts]

        if sum(_size(part) for _, part in parts) < WORTH_A_THREAD_BYTES:
            by_prompt = make()
        else:
            by_prompt = await asyncio.get_running_loop().run_in_executor(recorder.executor, make)
        turns = [new for of_prompt in by_prompt for new in of_prompt]
        if not turns:
            return
        evicted = await recorder.store.add(
            parts[0][0].plan.placement.session, [new.turn for new in turns], [new.entries for new in turns]
        )
        for (prompt, _), of_prompt in zip(parts, by_prompt, strict=True):
            if of_prompt:
                _count_ids(prompt.plan, of_prompt, recorder.metrics, first=prompt.holder is None)
                prompt.holder = prompt.holder or of_prompt[0].turn
                if prompt.plan.placement.claimed is not None:
                    self._claims.keep(prompt.plan.placement.claimed)
        _tell_trace(turns)
        if evicted.rollouts:
            recorder.metrics.count_evicted(evicted.rollouts, evicted.undelivered)
            log.info("the store is full: evicted %d rollouts (%d turns)", evicted.rollouts, evicted.turns)
        for new in turns:
            labels = (new.turn.finish_reason or "unknown", new.turn.problem or "none")
            recorder.metrics.turns.labels(*labels).inc()
            if new.cached is not None:
                recorder.cache.put(new.cached, new.turn.parent)


def _size(completion: Completion) -> int:
    """Bytes of the ids of a completion, about."""
    sampled = sum(len(choice.ids or ()) for choice in completion.choices)
    return len(completion.prompt_ids or b"") + 8 * sampled


def _count_ids(plan: PromptPlan, turns: list[NewTurn], metrics: Metrics, *, first: bool) -> None:
    """Count the sampled ids, and once for each request (`first`) the ids that the engine rendered."""
    metrics.sampled_ids.inc(sum(len(new.turn.completion) // 4 for new in turns))
    if first and not prompt_of(plan):
        metrics.rendered_ids.inc(turns[0].turn.prompt_tokens)


def _tell_trace(turns: list[NewTurn]) -> None:
    """Add the numbers of ids to the request's span, with OpenTelemetry's names for generative AI."""
    exchange = running_exchange()
    if exchange is None or not exchange.span.recording:
        return
    exchange.span.set(
        {
            "gen_ai.usage.input_tokens": turns[0].turn.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(new.turn.completion) // 4 for new in turns),
            "gen_ai.response.finish_reasons": [new.turn.finish_reason or "unknown" for new in turns],
        }
    )
