"""Records sampled turns: converts a plan and a completion into turns in the store.

A failure here never affects the client's response: it is logged and counted, and the turn is not recorded.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from weakref import WeakSet

from tokenproxy.monitoring.exchange import running_exchange, span
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Batch, Completion
from tokenproxy.record.encoders import WORTH_A_THREAD_BYTES
from tokenproxy.record.new_turns import NewTurn, new_turns
from tokenproxy.record.plan import PromptPlan, prompt_of
from tokenproxy.record.store import Store, StoreError
from tokenproxy.record.tasks import Tasks
from tokenproxy.record.turn import Turn

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
        self._holders: dict[int, Turn] = {}
        """The first turn that was recorded of each prompt. It holds the prompt, which the other choices
        share."""
        self._dropped: set[str] = set()
        """Rollouts that were deleted meanwhile."""
        for prompt in plan.prompts:
            claims.hold(prompt.placement.session.id)
        self._lock = asyncio.Lock()

    async def announce(self) -> None:
        """Create new rollouts before their first turns are complete, because the client now gets the name."""
        for placement in (prompt.placement for prompt in self.plan.prompts):
            if not placement.new_rollout or placement.conversation is None:
                continue
            try:
                await self._recorder.store.add(placement.session)
            except StoreError as error:
                consequence = f"rollout {placement.session.id} was not created before its first turn"
                error.report(self._recorder.metrics, consequence)

    def drop(self, rollout: str) -> None:
        """Record no more turns of a rollout, because it was deleted."""
        self._dropped.add(rollout)

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
            with self._survived("the turns of a request"), span("record", {}):
                if self._before_recording is not None:
                    await self._before_recording(completion)
                for position, part in self._parts(completion).items():
                    rollout = self.plan.prompts[position].placement.session.id
                    with self._survived(f"a turn of {rollout}"):
                        await self._record(position, part)
                    if self.plan.others:
                        await asyncio.sleep(0)  # as in planning: a store in memory never waits

    @contextmanager
    def _survived(self, what: str) -> Iterator[None]:
        """The boundary: a failure to record must not fail the response."""
        try:
            yield
        except StoreError as error:
            self._recorder.metrics.store_errors.inc()
            log.error("%s was not recorded: %s", what, error)
        except Exception:
            self._recorder.metrics.store_errors.inc()
            log.exception("%s could not be recorded", what)

    def _parts(self, completion: Completion) -> dict[int, Completion]:
        """The completions of the prompts with new choices, by the position of the prompt."""
        if not self.plan.others and completion.choices[0].prompt_ids is None:
            return {0: completion}  # of another route than completions
        batch = Batch(tuple(b"" for _ in self.plan.prompts), self.plan.placement.request.choices)
        return completion.by_prompt(batch)

    async def _record(self, position: int, completion: Completion) -> None:
        """Record the choices of one prompt, given its position."""
        recorder, plan, holder = self._recorder, self.plan.prompts[position], self._holders.get(position)
        placement = plan.placement
        if placement.session.id in self._dropped:
            log.info("a turn of %s is not recorded: its session was deleted", placement.session.id)
            return

        def make() -> list[NewTurn]:
            return new_turns(plan, completion, holder, self.replica)

        if _size(completion) < WORTH_A_THREAD_BYTES:
            turns = make()
        else:
            turns = await asyncio.get_running_loop().run_in_executor(recorder.executor, make)
        if not turns:
            return
        evicted = await recorder.store.add(
            placement.session, [new.turn for new in turns], [new.entries for new in turns]
        )
        metrics, sampled = recorder.metrics, sum(len(new.turn.completion) // 4 for new in turns)
        metrics.sampled_ids.inc(sampled)
        if holder is None:
            self._holders[position] = turns[0].turn
            if not prompt_of(plan):
                metrics.rendered_ids.inc(turns[0].turn.prompt_tokens)
            if placement.claimed is not None:
                self._claims.keep(placement.claimed)
        _tell_trace(turns, sampled)
        if evicted.rollouts:
            metrics.count_evicted(evicted.rollouts, evicted.undelivered)
            log.info("the store is full: evicted %d rollouts (%d turns)", evicted.rollouts, evicted.turns)
        for new in turns:
            metrics.turns.labels(new.turn.finish_reason or "unknown", new.turn.problem or "none").inc()
            if new.cached is not None:
                recorder.cache.put(new.cached, new.turn.parent)


def _size(completion: Completion) -> int:
    """Bytes of the ids of a completion, about."""
    sampled = sum(len(choice.ids or ()) for choice in completion.choices)
    return len(completion.prompt_ids or b"") + 8 * sampled


def _tell_trace(turns: list[NewTurn], sampled: int) -> None:
    """Add the numbers of ids to the request's span, with OpenTelemetry's names for generative AI."""
    exchange = running_exchange()
    if exchange is None or not exchange.span.recording:
        return
    exchange.span.set(
        {
            "gen_ai.usage.input_tokens": turns[0].turn.prompt_tokens,
            "gen_ai.usage.output_tokens": sampled,
            "gen_ai.response.finish_reasons": [new.turn.finish_reason or "unknown" for new in turns],
        }
    )
