"""Records sampled turns: makes turns of a plan and a completion, with their evidence and index entries.

A failure here never affects the client's response: it is logged and counted, and the turn is not recorded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from chat_tokenizer import InvalidIds, TokenizationError, ids
from chat_tokenizer.placeholders import PlaceholdersDiffer
from tokenproxy.base.evidence import RECORDED
from tokenproxy.base.request import EngineRoute
from tokenproxy.monitoring.exchange import running_exchange, span
from tokenproxy.record.cache import CachedTurn, cached_turn, hash_ids
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import (
    UNCHANGED,
    Completion,
    SampledChoice,
    logprobs_without,
    untrainable_reason,
)
from tokenproxy.record.echo import other_forms
from tokenproxy.record.encoders import WORTH_A_THREAD_BYTES
from tokenproxy.record.identity import Conversation, ids_entries, text_entries
from tokenproxy.record.images import name_by_digest, placed_by_engine
from tokenproxy.record.origin import origin_of
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.store import FULL, StoreError
from tokenproxy.record.turn import (
    IndexedTurn,
    IndexEntry,
    PromptImage,
    TellingTurn,
    Turn,
    pack_alternatives,
    pack_ids,
    pack_logprobs,
    turn_id,
    unpack_ids,
)
from tokenproxy.record.vocabulary import ABORTED, Problem, Source

if TYPE_CHECKING:
    from tokenproxy.record.history import History

log = logging.getLogger("tokenproxy")

BeforeRecording = Callable[[Completion], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to be recorded."""

    turn: Turn
    entries: list[IndexEntry]
    """The index entries of the turn; none if requests must not find it by its text."""
    cached: CachedTurn | None
    """None if its prompt is unknown."""


class Recording:
    """Records the turns of one request, as its choices end."""

    def __init__(
        self,
        history: "History",
        plan: PromptPlan,
        claims: Claims,
        before_recording: BeforeRecording | None = None,
    ) -> None:
        """Record nothing yet.

        Args:
            claims: those of the request: they hold the rollouts of the plan, and the claim of a prompt is
                kept when a turn of it was recorded.
            before_recording: adds evidence to a completion that does not come from its engine's answer.
        """
        self.plan = plan
        self.replica = ""
        """Name of the replica that serves the turns; set before the first one is added."""
        self.dropped: set[str] = set()
        """Rollouts that were deleted meanwhile."""
        self._history = history
        self._claims = claims
        self._before_recording = before_recording
        self._holders: dict[int, Turn] = {}
        """The first turn that was recorded of each prompt. It holds the prompt, which the other choices
        share."""
        self._lock = asyncio.Lock()
        history.running.add(self)
        for prompt in plan.prompts:
            claims.hold(prompt.session.id)

    async def announce(self) -> None:
        """Create new rollouts before their first turns are complete, because the client now gets the name."""
        for plan in self.plan.prompts:
            if not plan.new_rollout or plan.conversation is None:
                continue
            try:
                await self._history.store.add(plan.session)
            except StoreError as error:
                consequence = f"rollout {plan.session.id} was not created before its first turn"
                error.report(self._history.metrics, consequence)

    async def add(self, completion: Completion) -> None:
        """Record the choices of a completion. Other requests find them after this returns.

        If the caller is cancelled, the recording still completes.
        """
        if self.plan.conversation is not None and completion.choices:
            await self._history.tasks.finish(self._add(completion))

    def add_later(self, completion: Completion) -> None:
        """Record choices that were broken off, in the background: their request is being cancelled."""
        if self.plan.conversation is not None and completion.choices:
            self._history.tasks.finish(self._add(completion))

    async def _add(self, completion: Completion) -> None:
        async with self._lock:
            with span("record", {}):
                if completion.odd:
                    self._history.report_odd(completion)
                try:
                    if self._before_recording is not None:
                        await self._before_recording(completion)
                    batch = self.plan.batch
                    parts = {0: completion} if batch is None else completion.by_prompt(batch)
                except Exception as error:  # noqa: BLE001 - see `_report`
                    return self._report("the turns of a request", error)
                for position, part in parts.items():
                    plan = self.plan.prompts[position]
                    try:
                        await self._record(position, plan, part)
                    except Exception as error:  # noqa: BLE001 - see `_report`
                        self._report(f"a turn of {plan.session.id}", error)
                    if self.plan.others:
                        await asyncio.sleep(0)  # as in planning: a store in memory never waits

    def _report(self, what: str, error: Exception) -> None:
        """The boundary: a failure to record must not fail the response."""
        self._history.metrics.store_errors.inc()
        if isinstance(error, StoreError):
            log.error("%s was not recorded: %s", what, error)
        else:
            log.error("%s could not be recorded", what, exc_info=error)

    async def _record(self, position: int, plan: PromptPlan, completion: Completion) -> None:
        """Record the choices of one prompt, given its position and plan."""
        history, parent, holder = self._history, plan.parent, self._holders.get(position)
        if plan.session.id in self.dropped:
            log.info("a turn of %s is not recorded: its session was deleted", plan.session.id)
            return
        required = history.processed_logprobs_required
        make = partial(
            new_turns, plan, completion, holder, self.replica, processed_logprobs_required=required
        )
        size = len(completion.prompt_ids or b"") + 8 * completion.sampled
        if parent is not None and completion.prompt_ids == plan.prompt:
            size -= parent.size  # ids of the parent are only copied
        turns = make() if size < WORTH_A_THREAD_BYTES else await history.encoders.run(make)
        if not turns:
            return
        indexed = [IndexedTurn(new.turn, new.entries) for new in turns]
        evicted = await history.store.add(plan.session, indexed)
        metrics, sampled = history.metrics, sum([new.turn.completion_tokens for new in turns])
        metrics.sampled_ids.inc(sampled)
        metrics.turns_after_finish.inc(len(turns) * plan.request.after_finish)
        if holder is None:
            self._holders[position] = turns[0].turn
            if not plan.prompt:
                metrics.rendered_ids.inc(turns[0].turn.prompt_tokens)
            if plan.match.claimed and plan.match.turn is not None:
                self._claims.keep(plan.match.turn.id)
        _tell_trace(turns, sampled)
        evicted.report(metrics, FULL)
        for new in turns:
            metrics.turns(new.turn.finish_reason or "unknown", new.turn.problem or "none").inc()
            if new.cached is not None:
                history.cache.put(new.cached, new.turn.parent)


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


def new_turns(
    plan: PromptPlan,
    completion: Completion,
    holder: Turn | None,
    replica: str = "",
    *,
    processed_logprobs_required: bool = False,
) -> list[NewTurn]:
    """The turns of a completion. A choice without sampled ids gives none.

    Args:
        holder: the turn of the same request that already holds the prompt; None if there is none yet.
        replica: name of the replica that served the request.
        processed_logprobs_required: the setting.
    """
    turns: list[NewTurn] = []
    request, conversation = plan.request, plan.conversation
    assert conversation is not None  # the caller looked
    if request.engine_route is EngineRoute.GENERATE and completion.prompt_ids is None:
        completion.prompt_ids = plan.prompt or None  # up to vLLM 0.29 it returns none; it takes only ids
    without = logprobs_without(request, plan.logprobs_mode)
    refused = Problem.LOGPROBS_NOT_PROCESSED if without and processed_logprobs_required else ""
    of_request = {
        "rollout": plan.session.id,
        "request": plan.turn_id,
        "model": plan.scope.model,
        "replica": replica,
        "cached_tokens": completion.cached_tokens,
        "source": plan.source,
        "reason": plan.reason or "",
        "temperature": request.temperature,
        "off_policy": request.off_policy,
        "after_finish": request.after_finish,
        "logprobs_mode": plan.logprobs_mode,
        "logprobs_without": without,
        "problem": refused,
        **origin_of(request.headers)._asdict(),
        "requested_model": request.requested_model,
        "scope": plan.scope.parts,
    }
    for choice in completion.choices:
        if choice.ids or choice.finish_reason not in (None, ABORTED):
            turns.append(_new_turn(plan, conversation, completion, choice, holder, of_request))
            holder = holder or turns[-1].turn
    return turns


def _new_turn(
    plan: PromptPlan,
    conversation: Conversation,
    completion: Completion,
    choice: SampledChoice,
    holder: Turn | None,
    of_request: Mapping[str, Any],
) -> NewTurn:
    """The turn of one choice. `of_request`: the fields that all choices of the request share."""
    request, parent, prompt, images = plan.request, plan.parent, plan.prompt, _images(plan, completion)
    problem = untrainable_reason(completion, choice, prompt, media=images is None)
    if not prompt or problem in (Problem.PROMPT_MISMATCH, Problem.NO_PROMPT_IDS):
        # the engine made the prompt, or used another one than was sent
        images = None if prompt else images
        parent, prompt = None, ids.compact(completion.prompt_ids or b"")
    try:
        sampled, logprobs = pack_ids(choice.ids or ()), pack_logprobs(choice.logprobs or ())
    except (OverflowError, TypeError):
        sampled, logprobs, problem = b"", b"", problem or Problem.UNREADABLE_EVIDENCE
    history, message, findable, prefilled = conversation, choice.message, plan.findable, None
    try:
        answer = conversation.answered(choice.message)
        if request.prefill and (joined := conversation.continued(choice.message)):
            # a client sends both parts as they were, or, mostly, as one message
            findable, prefilled, (history, message) = True, answer, joined
            answer = history.answered(message)
    except TokenizationError:
        answer = None
    appended = _appended(completion, parent, prompt)
    hasher, count = hash_ids(parent, appended, sampled), len(choice.ids or ())
    shares = holder is not None and holder.parent == (parent.id if parent else None)
    first, own = plan.first_new if parent else 0, answer.message if answer else None
    turn = TellingTurn(
        id=turn_id(plan.turn_id, choice.index),
        parent=parent.id if parent else None,
        choice=choice.index,
        created=time.time(),
        prompt_turn=holder.id if holder is not None and shares else None,
        **({} if shares else _prompt_fields(plan, conversation.json(first), parent, appended, images or ())),
        message=msgspec.json.encode(choice.message),
        completion=sampled,
        logprobs=logprobs,
        alternatives=pack_alternatives(choice.alternatives) if 0 < len(choice.alternatives) == count else b"",
        prompt_tokens=len(appended) // 4 + (parent.count if parent else 0),
        **{name: getattr(choice, name) for name in UNCHANGED},
        **{fact.name: fact.pack(choice.facts.get(fact.name), count) for fact in RECORDED},
        routed_experts_start=request.routed_experts_start if choice.facts.get("routed_experts") else 0,
        spelling_before=history.strict_before(len(history.messages)),
        spelling=own.strict if own and findable else b"",
        reasonings=(*history.ignored(first), own.ignored if own else b""),
        calls=own.arguments if own and own.cut_off else (),
        ids_digest=hasher.digest(),
        **{**of_request, **({"problem": problem} if problem else {})},
    )
    # a turn without exact ids is found too, to report that, and never equals another turn
    found_ids = turn.ids_digest if sampled and prompt else turn.id.encode()
    entries = text_entries(plan.scope, answer, found_ids) if answer and findable else []
    if prefilled:
        entries.append(text_entries(plan.scope, prefilled, found_ids)[0])
    if entries:
        before = len(history.ends) + history.ends_with_assistant
        forms = map(history.answered, other_forms(message, choice.stop_reason, before))
        entries += [text_entries(plan.scope, form, found_ids)[1] for form in forms]
    if len(prompt) <= len("[]"):
        return NewTurn(turn, entries, None)
    data = ids.concatenate(prompt, choice.raw_ids or ids.dump(unpack_ids(sampled)))
    cached = cached_turn([turn], parent, data, hasher)
    if images:
        cached = replace(cached, images=images)
    if request.prompts and cached.usable:
        entries += ids_entries(plan.scope, ids.pack(cached.ids), turn.ids_digest)
    return NewTurn(turn, entries, cached)


def _images(plan: PromptPlan, completion: Completion) -> tuple[PromptImage, ...] | None:
    """The images of a turn's prompt; None if it is not known where they are in its ids."""
    if plan.request.prompt_media:
        return None
    if plan.source is not Source.RENDERED:
        return plan.images
    conversation = plan.conversation
    if conversation is None or not conversation.media:
        return ()
    if plan.rendered_images is None or completion.prompt_ids is None:
        return None
    try:
        prompt = unpack_ids(ids.pack(completion.prompt_ids))
        return tuple(placed_by_engine(prompt, plan.placeholder, plan.rendered_images))
    except (InvalidIds, PlaceholdersDiffer):
        return None


def _prompt_fields(
    plan: PromptPlan,
    messages: bytes,
    parent: CachedTurn | None,
    appended: bytes,
    images: Sequence[PromptImage],
) -> dict[str, Any]:
    """The fields `OF_PROMPT` of a turn."""
    rendering, parts = plan.request.rendering, plan.scope.parts
    before, scope = (parent.count, parent.scope) if parent else (0, ())
    new = tuple([image for image in images if image.offset >= before])
    return {
        "tools": None if parent and scope[:1] == parts[:1] else rendering.tools,
        "template_kwargs": None if parent and scope[1:2] == parts[1:2] else rendering.template_kwargs,
        "messages": name_by_digest(messages, new) if new else messages,
        "appended": appended,
        "images": new,
    }


def _appended(completion: Completion, parent: CachedTurn | None, prompt: bytes) -> bytes:
    """The packed ids of a prompt after those of the parent; all of them if there is none."""
    if parent is None:
        if completion.packed_prompt is not None and completion.prompt_ids == prompt:
            return completion.packed_prompt
        return ids.pack(prompt) if len(prompt) > len("[]") else b""
    tail = prompt[parent.size - 1 :]  # `,7,8]`, or `]` alone
    return ids.pack(b"[" + tail.removeprefix(b",")) if len(tail) > 1 else b""
