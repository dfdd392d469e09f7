"""Makes the turns of a completion as they are recorded: their ids, evidence and index entries."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from chat_tokenizer import InvalidIds, TokenizationError, canonical, ids
from chat_tokenizer.placeholders import PlaceholdersDiffer
from tokenproxy.base.request import EngineRoute
from tokenproxy.record.cache import CachedTurn, cached_turn, hash_ids
from tokenproxy.record.completion import Completion, SampledChoice, untrainable_reason
from tokenproxy.record.conversation import Conversation, is_distinctive
from tokenproxy.record.identity import ids_entries, text_entries
from tokenproxy.record.images import name_by_digest, placed_by_engine
from tokenproxy.record.origin import origin_of
from tokenproxy.record.plan import Extended, Placement, PromptPlan, Rendered, images_of, prompt_of
from tokenproxy.record.store import IndexEntry
from tokenproxy.record.turn import (
    PromptImage,
    Turn,
    pack_alternatives,
    pack_ids,
    pack_logprobs,
    turn_id,
    unpack_ids,
)
from tokenproxy.record.vocabulary import ABORTED, Problem


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to be recorded."""

    turn: Turn
    entries: list[IndexEntry]
    """The index entries of the turn; none if requests must not find it by its text."""
    cached: CachedTurn | None
    """None if its prompt is unknown."""


def new_turns(
    plan: PromptPlan, completion: Completion, holder: Turn | None, replica: str = ""
) -> list[NewTurn]:
    """The turns of a completion. A choice without sampled ids gives none.

    Args:
        holder: the turn of the same request that already holds the prompt; None if there is none yet.
        replica: name of the replica that served the request.
    """
    turns: list[NewTurn] = []
    if plan.placement.request.engine_route is EngineRoute.GENERATE and completion.prompt_ids is None:
        completion.prompt_ids = prompt_of(plan) or None  # up to vLLM 0.29 it returns none; it takes only ids
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
    images, sent = _images(plan, completion), prompt_of(plan)
    problem = untrainable_reason(completion, choice, sent, media=images is None)
    parent, prompt = placement.parent, sent
    if not sent or problem in (Problem.PROMPT_MISMATCH, Problem.NO_PROMPT_IDS):
        # the engine made the prompt, or used another one than was sent
        parent, prompt = None, ids.compact(completion.prompt_ids or b"")
        images = None if sent else images
    try:
        sampled, logprobs = pack_ids(choice.ids or ()), pack_logprobs(choice.logprobs or ())
    except (OverflowError, TypeError):
        sampled, logprobs, problem = b"", b"", problem or Problem.UNREADABLE_EVIDENCE
    try:
        own = canonical(choice.message, defaults=conversation.defaults)
    except TokenizationError:
        own = None
    appended = _appended(plan, completion, parent, prompt)
    hasher = hash_ids(parent, appended, sampled)
    first = placement.first_new if parent else 0
    shares = holder is not None and holder.parent == (parent.id if parent else None)
    origin, request = origin_of(placement.request.headers), placement.request
    arguments = own.arguments if own else ()
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
        **({} if shares else _prompt_fields(placement, conversation, parent, appended, images or ())),
        message=msgspec.json.encode(choice.message),
        completion=sampled,
        logprobs=logprobs,
        alternatives=_pack_alternatives(choice),
        prompt_tokens=len(appended) // 4 + (parent.count if parent else 0),
        cached_tokens=completion.cached_tokens,
        source=plan.source,
        reason=plan.reason or "",
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        temperature=request.temperature,
        logprobs_mode=placement.logprobs_mode,
        problem=problem or "",
        weight_versions=choice.weight_versions,
        weights_uncertain=choice.weights_uncertain,
        routed_experts=choice.routed_experts,
        routed_experts_start=request.routed_experts_start if choice.routed_experts else 0,
        sampling_mask=_pack_mask(choice),
        request_class=origin.request_class,
        agent=origin.agent,
        parent_agent=origin.parent_agent,
        requested_model=request.requested_model,
        scope=placement.scope.parts,
        spelling_before=conversation.strict_before(len(conversation.messages)),
        spelling=own.strict if own and placement.findable else b"",
        reasonings=(*conversation.reasonings(first, len(conversation.raws)), own.reasoning if own else b""),
        calls=arguments if any(each[:1] == b"t" for each in arguments) else (),
        ids_digest=hasher.digest(),
    )
    entries: list[IndexEntry] = []
    if own and placement.findable:
        # a turn without exact ids is found too, to report that, and never equals another turn
        found_ids = turn.ids_digest if sampled and prompt else turn.id.encode()
        distinctive = is_distinctive(choice.message)
        entries = text_entries(placement.scope, conversation, own, distinctive, found_ids)
    if not prompt:
        return NewTurn(turn, entries, None)
    cached = cached_turn(turn, parent, prompt, hasher, choice.raw_ids)
    if images:
        cached = replace(cached, images=tuple(images))
    if placement.found_by_ids and cached.usable:
        entries += ids_entries(placement.scope, ids.pack(cached.ids), turn.ids_digest)
    return NewTurn(turn, entries, cached)


def _images(plan: PromptPlan, completion: Completion) -> tuple[PromptImage, ...] | None:
    """The images of a turn's prompt; None if it is not known where they are in its ids."""
    if plan.placement.request.prompt_media:
        return None
    if not isinstance(plan, Rendered):
        return images_of(plan)
    conversation = plan.placement.conversation
    if conversation is None or not conversation.media:
        return ()
    if plan.images is None or completion.prompt_ids is None:
        return None
    try:
        prompt = unpack_ids(ids.pack(completion.prompt_ids))
        return tuple(placed_by_engine(prompt, plan.placeholder, plan.images))
    except (InvalidIds, PlaceholdersDiffer):
        return None


def _prompt_fields(
    placement: Placement,
    conversation: Conversation,
    parent: CachedTurn | None,
    appended: bytes,
    images: Sequence[PromptImage],
) -> dict[str, Any]:
    """The fields of a turn that the choices of one request share."""
    rendering, parts = placement.scope.rendering, placement.scope.parts
    before, scope = (parent.count, parent.scope) if parent else (0, ())
    messages = conversation.json(placement.first_new if parent else 0)
    new = tuple(image for image in images if image.offset >= before)
    return {
        "tools": None if parent and scope[:1] == parts[:1] else rendering.tools,
        "template_kwargs": None if parent and scope[1:2] == parts[1:2] else rendering.template_kwargs,
        "messages": name_by_digest(messages, new) if new else messages,
        "appended": appended,
        "images": new,
    }


def _appended(plan: PromptPlan, completion: Completion, parent: CachedTurn | None, prompt: bytes) -> bytes:
    """The packed ids of a prompt after those of the parent; all of them if there is none."""
    if parent is None:
        if completion.packed_prompt is not None and completion.prompt_ids == prompt:
            return completion.packed_prompt
        return ids.pack(prompt) if len(prompt) > 2 else b""
    if isinstance(plan, Extended) and plan.reused == parent.count:
        return pack_ids(plan.appended)
    tail = prompt[parent.size - 1 :]  # `,7,8]`, or `]` alone
    return ids.pack(b"[" + tail.removeprefix(b",")) if len(tail) > 1 else b""


def _pack_mask(choice: SampledChoice) -> tuple[bytes, bytes] | None:
    """Pack a sampling mask; None if there is none, or not one set of ids for each sampled id."""
    mask = choice.sampling_mask
    if mask is None or len(mask) != len(choice.ids or ()):
        return None
    return pack_ids([len(kept) for kept in mask]), pack_ids([each for kept in mask for each in kept])


def _pack_alternatives(choice: SampledChoice) -> bytes:
    """Pack the alternatives of a choice; empty if there are none, or not one list for each sampled id."""
    found = choice.alternatives
    return pack_alternatives(found) if found and len(found) == len(choice.ids or ()) else b""
