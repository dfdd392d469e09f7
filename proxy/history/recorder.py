"""Records sampled turns: converts a plan and a completion into turns in the store.

A failure here never affects the client's response: it is logged and counted, and the turn is not recorded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import msgspec

from proxy.history.cache import TurnCache
from proxy.history.cached_turn import CachedTurn, cached_turn, hash_ids
from proxy.history.completion import Batch, Completion, SampledChoice, untrainable_reason
from proxy.history.conversation import Conversation, is_distinctive
from proxy.history.encoders import WORTH_A_THREAD_BYTES
from proxy.history.ids_index import ids_entries
from proxy.history.images import name_by_digest, placed_by_engine
from proxy.history.matcher import index_entries
from proxy.history.plan import Extended, Placement, PromptPlan, Rendered, images_of, prompt_of
from proxy.history.prompt_image import PromptImage
from proxy.history.store import IndexEntry, Store, StoreError
from proxy.history.tasks import Tasks
from proxy.history.turn import Turn, pack_ids, pack_logprobs, turn_id, unpack_ids
from proxy.history.vocabulary import ABORTED, Problem
from proxy.metrics import Metrics
from proxy.monitoring.exchange import running_exchange, span
from tokenization import CanonicalMessage, InvalidIds, TokenizationError, canonical, ids
from tokenization.placeholders import PlaceholdersDiffer

log = logging.getLogger("tokenproxy")

_UNREADABLE = CanonicalMessage(b"", b"", b"")
BeforeRecording = Callable[[Completion], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to be recorded."""

    turn: Turn
    entries: list[IndexEntry]
    """The index entries of the turn; none if requests must not find it by its text."""
    cached: CachedTurn | None
    """None if its prompt is unknown."""


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
        self, plan: PromptPlan, replica: str = "", before_recording: BeforeRecording | None = None
    ) -> "Recording":
        """The recording of one request's turns, which the named replica serves.

        Args:
            before_recording: adds evidence to a completion that does not come from its engine's answer.
        """
        recording = Recording(self, plan, replica, before_recording)
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
        replica: str,
        before_recording: BeforeRecording | None = None,
    ) -> None:
        self._before_recording = before_recording
        self.plan = plan
        self._replica = replica
        self._recorder = recorder
        self._prompts = [_PromptRecord(prompt) for prompt in plan.prompts]
        self._lock = asyncio.Lock()

    @property
    def unrecorded(self) -> list[Placement]:
        """The placements of the prompts of which no turn was recorded."""
        return [prompt.plan.placement for prompt in self._prompts if prompt.holder is None]

    async def announce(self) -> None:
        """Create new rollouts before their first turns are complete, because the client now gets the name."""
        for prompt in self._prompts:
            placement = prompt.plan.placement
            if not placement.new_rollout or placement.conversation is None:
                continue
            try:
                await self._recorder.store.save_session(placement.session)
            except StoreError as error:
                self._recorder.metrics.store_errors.inc()
                message = "rollout %s was not created before its first turn: %s"
                log.log(error.level, message, placement.session.id, error)

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
            return [new_turns(prompt.plan, part, prompt.holder, self._replica) for prompt, part in parts]

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


def new_turns(
    plan: PromptPlan, completion: Completion, holder: Turn | None, replica: str = ""
) -> list[NewTurn]:
    """The turns of a completion. A choice without sampled ids gives none.

    Args:
        holder: the turn of the same request that already holds the prompt; None if there is none yet.
        replica: name of the replica that served the request.
    """
    turns: list[NewTurn] = []
    for choice in completion.choices:
        if choice.ids or choice.finish_reason not in (None, ABORTED):
            turns.append(_new_turn(plan, completion, choice, holder, replica))
            holder = holder or turns[-1].turn
    return turns


def _new_turn(
    plan: PromptPlan, completion: Completion, choice: SampledChoice, holder: Turn | None, replica: str
) -> NewTurn:
    placement, conversation = plan.placement, plan.placement.conversation
    assert conversation is not None  # the caller looked
    sent = prompt_of(plan)
    images = _images(plan, completion) if conversation.media or images_of(plan) else ()
    if placement.media:
        images = None
    problem = untrainable_reason(completion, choice, sent, media=images is None)
    # the prompt that the engine used counts, not the one that was sent
    as_sent = bool(sent) and problem not in (Problem.PROMPT_MISMATCH, Problem.NO_PROMPT_IDS)
    if sent and not as_sent:
        images = None
    parent = placement.parent if as_sent else None
    prompt = sent if as_sent else ids.compact(completion.prompt_ids or b"")
    appended = _appended(plan, parent, prompt, completion)
    sampled, logprobs, problem = _pack_evidence(choice, problem)
    own = _canonical(choice.message)
    hasher = hash_ids(parent, appended, sampled)
    first = placement.first_new if parent else 0
    before = parent.count if parent else 0
    own_images = tuple(image for image in images or () if image.offset >= before)
    shares = holder is not None and holder.parent == (parent.id if parent else None)
    turn = Turn(
        id=turn_id(placement.turn_id, choice.index),
        rollout=placement.session.id,
        parent=parent.id if parent else None,
        request=placement.turn_id,
        choice=choice.index,
        created=time.time(),
        model=placement.scope.model,
        replica=replica,
        prompt_turn=holder.id if holder is not None and shares else None,
        **({} if shares else _prompt_fields(placement, conversation, parent, first, appended, own_images)),
        message=msgspec.json.encode(choice.message),
        completion=sampled,
        logprobs=logprobs,
        prompt_tokens=len(appended) // 4 + before,
        source=plan.source,
        reason=plan.reason or "",
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        temperature=placement.temperature,
        logprobs_mode=placement.logprobs_mode,
        problem=problem or "",
        weight_versions=choice.weight_versions,
        weights_uncertain=choice.weights_uncertain,
        routed_experts=choice.routed_experts,
        routed_experts_start=placement.routed_experts_start if choice.routed_experts else 0,
        sampling_mask=_pack_mask(choice),
        request_class=placement.request_class,
        scope=placement.scope.parts,
        spelling_before=conversation.strict_before(len(conversation.messages)),
        spelling=own.strict if placement.findable else b"",
        reasonings=(*conversation.reasonings(first, len(conversation.raws)), own.reasoning),
        calls=own.arguments if any(each[:1] == b"t" for each in own.arguments) else (),
        ids_digest=hasher.digest(),
    )
    # a turn without exact ids is found too, to report that, and never equals another turn
    found_ids = turn.ids_digest if sampled and prompt else turn.id.encode()
    entries = _index_entries(placement, conversation, choice, own, found_ids)
    cached = cached_turn(turn, parent, prompt, hasher, choice.raw_ids) if prompt else None
    if cached is not None and images:
        cached = replace(cached, images=images)
    if placement.found_by_ids and cached is not None and cached.usable:
        entries += ids_entries(placement.scope, ids.pack(cached.ids), turn.ids_digest)
    return NewTurn(turn, entries, cached)


def _images(plan: PromptPlan, completion: Completion) -> tuple[PromptImage, ...] | None:
    """The images of a turn's prompt; None if it is not known where they are in its ids."""
    if not isinstance(plan, Rendered):
        return images_of(plan)
    if plan.images is None or completion.prompt_ids is None:
        return None
    try:
        prompt = unpack_ids(ids.pack(completion.prompt_ids))
        return tuple(placed_by_engine(prompt, plan.placeholder, plan.images))
    except (InvalidIds, PlaceholdersDiffer):
        return None


def _index_entries(
    placement: Placement,
    conversation: Conversation,
    choice: SampledChoice,
    own: CanonicalMessage,
    found_ids: bytes,
) -> list[IndexEntry]:
    """The index entries by which other requests find a turn; none if they cannot find it by its text."""
    if not placement.findable or own is _UNREADABLE:
        return []
    return index_entries(placement.scope, conversation, own, is_distinctive(choice.message), found_ids)


def _prompt_fields(
    placement: Placement,
    conversation: Conversation,
    parent: CachedTurn | None,
    first: int,
    appended: bytes,
    images: tuple[PromptImage, ...],
) -> dict[str, Any]:
    """The fields of a turn that the choices of one request share."""
    rendering, parts = placement.scope.rendering, placement.scope.parts
    messages = conversation.json(first)
    return {
        "tools": None if parent and parent.scope[:1] == parts[:1] else rendering.tools,
        "template_kwargs": (
            None if parent and parent.scope[1:2] == parts[1:2] else rendering.template_kwargs
        ),
        "messages": name_by_digest(messages, images) if images else messages,
        "appended": appended,
        "images": images,
    }


def _appended(plan: PromptPlan, parent: CachedTurn | None, prompt: bytes, completion: Completion) -> bytes:
    """The packed ids of a prompt after those of the parent; all of them if there is no parent."""
    if parent is None:
        if completion.packed_prompt is not None and completion.prompt_ids == prompt:
            return completion.packed_prompt
        return ids.pack(prompt) if len(prompt) > 2 else b""
    if isinstance(plan, Extended) and plan.reused == parent.count:
        return pack_ids(plan.appended)
    tail = prompt[parent.size - 1 :]  # `,7,8]`, or `]` alone
    return ids.pack(b"[" + tail.removeprefix(b",")) if len(tail) > 1 else b""


def _pack_evidence(choice: SampledChoice, problem: Problem | None) -> tuple[bytes, bytes, Problem | None]:
    """Pack ids and log-probabilities; if one cannot be packed, the turn is untrainable."""
    try:
        return pack_ids(choice.ids or ()), pack_logprobs(choice.logprobs or ()), problem
    except (OverflowError, TypeError):
        return b"", b"", problem or Problem.UNREADABLE_EVIDENCE


def _pack_mask(choice: SampledChoice) -> tuple[bytes, bytes] | None:
    """Pack a sampling mask; None if there is none, or not one set of ids for each sampled id."""
    mask = choice.sampling_mask
    if mask is None or len(mask) != len(choice.ids or ()):
        return None
    return pack_ids([len(kept) for kept in mask]), pack_ids([each for kept in mask for each in kept])


def _canonical(message: dict[str, Any]) -> CanonicalMessage:
    try:
        return canonical(message)
    except TokenizationError:
        return _UNREADABLE
