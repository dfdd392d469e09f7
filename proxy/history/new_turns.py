"""Makes the turns of a completion as they are recorded: their ids, evidence and index entries."""

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from proxy.history.cached_turn import CachedTurn, cached_turn, hash_ids
from proxy.history.completion import Completion, SampledChoice, untrainable_reason
from proxy.history.conversation import Conversation, is_distinctive
from proxy.history.ids_index import ids_entries
from proxy.history.images import name_by_digest, placed_by_engine
from proxy.history.plan import Extended, Placement, PromptPlan, Rendered, images_of, prompt_of
from proxy.history.prompt_image import PromptImage
from proxy.history.store import IndexEntry
from proxy.history.text_index import text_entries
from proxy.history.turn import Turn, pack_alternatives, pack_ids, pack_logprobs, turn_id, unpack_ids
from proxy.history.vocabulary import ABORTED, Problem
from tokenization import CanonicalMessage, InvalidIds, TokenizationError, canonical, ids
from tokenization.canonical import NO_DEFAULTS
from tokenization.placeholders import PlaceholdersDiffer

_UNREADABLE = CanonicalMessage(b"", b"", b"")


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn to be recorded."""

    turn: Turn
    entries: list[IndexEntry]
    """The index entries of the turn; none if requests must not find it by its text."""
    cached: CachedTurn | None
    """None if its prompt is unknown."""


class _Prompt(NamedTuple):
    """The prompt of a turn, as the engine used it."""

    parent: CachedTurn | None
    """The turn whose ids it begins with."""
    ids: bytes
    """The whole prompt as a compact JSON array; empty if it is unknown."""
    appended: bytes
    """The packed ids after those of the parent."""
    images: tuple[PromptImage, ...]
    cached: int | None
    """How many of the ids were in the engine's prefix cache; None if it did not tell."""


class _Sampled(NamedTuple):
    """What was sampled for a turn, as it is recorded."""

    ids: bytes
    logprobs: bytes
    problem: Problem | None
    message: CanonicalMessage


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
    images = _images(plan, completion)
    problem = untrainable_reason(completion, choice, prompt_of(plan), media=images is None)
    prompt = _prompt(plan, completion, problem, images or ())
    sampled = _Sampled(
        *_pack_evidence(choice, problem), _canonical(choice.message, plan.placement.conversation)
    )
    hasher = hash_ids(prompt.parent, prompt.appended, sampled.ids)
    turn = _turn(plan, choice, prompt, sampled, holder, replica, hasher.digest())
    # a turn without exact ids is found too, to report that, and never equals another turn
    found_ids = turn.ids_digest if sampled.ids and prompt.ids else turn.id.encode()
    entries = _entries(plan.placement, choice, sampled.message, found_ids)
    cached = cached_turn(turn, prompt.parent, prompt.ids, hasher, choice.raw_ids) if prompt.ids else None
    if cached is not None and prompt.images:
        cached = replace(cached, images=prompt.images)
    if plan.placement.found_by_ids and cached is not None and cached.usable:
        entries += ids_entries(plan.placement.scope, ids.pack(cached.ids), turn.ids_digest)
    return NewTurn(turn, entries, cached)


def _prompt(
    plan: PromptPlan, completion: Completion, problem: Problem | None, images: tuple[PromptImage, ...]
) -> _Prompt:
    """The prompt that the engine used, which may not be the one that was sent."""
    sent = prompt_of(plan)
    if not sent or problem in (Problem.PROMPT_MISMATCH, Problem.NO_PROMPT_IDS):
        echoed = ids.compact(completion.prompt_ids or b"")
        packed = completion.packed_prompt if completion.prompt_ids == echoed else None
        if packed is None:
            packed = ids.pack(echoed) if len(echoed) > 2 else b""
        return _Prompt(None, echoed, packed, () if sent else images, completion.cached_tokens)
    parent = plan.placement.parent
    return _Prompt(parent, sent, _appended(plan, parent, sent), images, completion.cached_tokens)


def _turn(
    plan: PromptPlan,
    choice: SampledChoice,
    prompt: _Prompt,
    sampled: _Sampled,
    holder: Turn | None,
    replica: str,
    ids_digest: bytes,
) -> Turn:
    placement, conversation, parent = plan.placement, plan.placement.conversation, prompt.parent
    assert conversation is not None  # the caller looked
    first = placement.first_new if parent else 0
    shares = holder is not None and holder.parent == (parent.id if parent else None)
    arguments = sampled.message.arguments
    return Turn(
        id=turn_id(placement.turn_id, choice.index),
        rollout=placement.session.id,
        parent=parent.id if parent else None,
        request=placement.turn_id,
        choice=choice.index,
        created=time.time(),
        model=placement.scope.model,
        replica=replica,
        prompt_turn=holder.id if holder is not None and shares else None,
        **({} if shares else _prompt_fields(placement, conversation, prompt, first)),
        message=msgspec.json.encode(choice.message),
        completion=sampled.ids,
        logprobs=sampled.logprobs,
        alternatives=_pack_alternatives(choice),
        prompt_tokens=len(prompt.appended) // 4 + (parent.count if parent else 0),
        cached_tokens=prompt.cached,
        source=plan.source,
        reason=plan.reason or "",
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        temperature=placement.temperature,
        logprobs_mode=placement.logprobs_mode,
        problem=sampled.problem or "",
        weight_versions=choice.weight_versions,
        weights_uncertain=choice.weights_uncertain,
        routed_experts=choice.routed_experts,
        routed_experts_start=placement.routed_experts_start if choice.routed_experts else 0,
        sampling_mask=_pack_mask(choice),
        request_class=placement.origin.request_class,
        agent=placement.origin.agent,
        parent_agent=placement.origin.parent_agent,
        requested_model=placement.requested_model,
        scope=placement.scope.parts,
        spelling_before=conversation.strict_before(len(conversation.messages)),
        spelling=sampled.message.strict if placement.findable else b"",
        reasonings=(*conversation.reasonings(first, len(conversation.raws)), sampled.message.reasoning),
        calls=arguments if any(each[:1] == b"t" for each in arguments) else (),
        ids_digest=ids_digest,
    )


def _images(plan: PromptPlan, completion: Completion) -> tuple[PromptImage, ...] | None:
    """The images of a turn's prompt; None if it is not known where they are in its ids."""
    if plan.placement.media:
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


def _entries(
    placement: Placement, choice: SampledChoice, own: CanonicalMessage, found_ids: bytes
) -> list[IndexEntry]:
    """The index entries by which other requests find a turn; none if they cannot find it by its text."""
    if placement.conversation is None or not placement.findable or own is _UNREADABLE:
        return []
    distinctive = is_distinctive(choice.message)
    return text_entries(placement.scope, placement.conversation, own, distinctive, found_ids)


def _prompt_fields(
    placement: Placement, conversation: Conversation, prompt: _Prompt, first: int
) -> dict[str, Any]:
    """The fields of a turn that the choices of one request share."""
    rendering, parts, parent = placement.scope.rendering, placement.scope.parts, prompt.parent
    messages = conversation.json(first)
    before = parent.count if parent else 0
    images = tuple(image for image in prompt.images if image.offset >= before)
    return {
        "tools": None if parent and parent.scope[:1] == parts[:1] else rendering.tools,
        "template_kwargs": (
            None if parent and parent.scope[1:2] == parts[1:2] else rendering.template_kwargs
        ),
        "messages": name_by_digest(messages, images) if images else messages,
        "appended": prompt.appended,
        "images": images,
    }


def _appended(plan: PromptPlan, parent: CachedTurn | None, prompt: bytes) -> bytes:
    """The packed ids of a prompt that was sent after those of the parent; all of them if there is none."""
    if parent is None:
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


def _pack_alternatives(choice: SampledChoice) -> bytes:
    """Pack the alternatives of a choice; empty if there are none, or not one list for each sampled id."""
    found = choice.alternatives
    return pack_alternatives(found) if found and len(found) == len(choice.ids or ()) else b""


def _canonical(message: dict[str, Any], conversation: Conversation | None) -> CanonicalMessage:
    try:
        return canonical(message, defaults=conversation.defaults if conversation else NO_DEFAULTS)
    except TokenizationError:
        return _UNREADABLE
