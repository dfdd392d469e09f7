"""From a plan and what the engine answered to the turns that are stored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from proxy.history.conversation import Conversation
from proxy.history.evidence import Outcome, Sampled, problem_of
from proxy.history.matcher import Kind, exchange, keys_of, rollout_key
from proxy.history.plan import Plan
from proxy.history.turn import ABORTED, Turn, made_up, pack_ids, pack_logprobs, turn_id
from tokenization import CanonicalMessage, TokenizationError, canonical, ids
from tokenization.canonical import extend

_NOT_SAID = CanonicalMessage(b"", b"", b"")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A turn with what finds it again."""

    turn: Turn
    keys: list[bytes]
    prompt: bytes
    """The whole prompt as a JSON array; empty if unknown."""
    completion: Sequence[int]


def recorded(plan: Plan, outcome: Outcome) -> list[Recorded]:
    """The turns of an answer. Choices of which nothing was sampled make none."""
    return [
        _turn(plan, outcome, sampled)
        for sampled in outcome.choices
        if sampled.ids or sampled.finish_reason not in (None, ABORTED)
    ]


def _turn(plan: Plan, outcome: Outcome, sampled: Sampled) -> Recorded:
    conversation = plan.conversation
    assert conversation is not None  # the caller looked
    problem = problem_of(outcome, sampled, plan.prompt, conversation.media)
    # what the engine did counts, not what it was asked to do
    parent = None if problem == "prompt_mismatch" else plan.parent
    prompt = plan.prompt if parent else ids.compact(outcome.prompt_ids or b"")
    appended = plan.added if parent else _ids(prompt)
    completion = sampled.ids or []
    first = plan.end + 1 if parent else 0
    try:
        own = canonical(sampled.message)
    except TokenizationError:
        own = _NOT_SAID
    turn = Turn(
        id=turn_id(plan.request, sampled.index),
        rollout=plan.rollout,
        parent=parent.turn if parent else None,
        request=plan.request,
        choice=sampled.index,
        created=time.time(),
        model=plan.model,
        tools=b"" if parent else conversation.setting.tools,
        template_kwargs=b"" if parent else conversation.setting.template_kwargs,
        messages=conversation.json(first),
        message=msgspec.json.encode(sampled.message),
        appended=pack_ids(appended),
        completion=pack_ids(completion),
        logprobs=pack_logprobs(sampled.logprobs or ()),
        prompt_tokens=len(appended) + (parent.count if parent else 0),
        source=plan.source,
        reason=plan.reason,
        finish_reason=sampled.finish_reason,
        stop_reason=sampled.stop_reason,
        temperature=plan.asked.temperature,
        problem=problem,
        weight_versions=sampled.weight_versions,
        routed_experts=sampled.routed_experts,
        settings=conversation.begin[1:],
        strict_before=_last(conversation.strict, conversation),
        strict=own.strict,
        reasonings=(*conversation.reasonings(first, len(conversation.raws)), own.reasoning),
    )
    keys = [] if own is _NOT_SAID else _keys(plan, conversation, own)
    return Recorded(turn, keys, prompt, completion)


def _keys(plan: Plan, conversation: Conversation, own: CanonicalMessage) -> list[bytes]:
    if not plan.whole:
        return [rollout_key(plan.rollout)]
    digests: dict[Kind, bytes] = {
        "exact": extend(_last(conversation.strict, conversation), own.strict),
        "conversation": extend(_last(conversation.loose, conversation), own.loose),
        "content": extend(_last(conversation.content, conversation), own.loose),
        "message": own.loose,
        "exchange": exchange(conversation, len(conversation.messages), own.loose),
    }
    return keys_of(digests, plan.rollout, None if made_up(plan.rollout) else plan.rollout)


def _last(chain: Sequence[bytes], conversation: Conversation) -> bytes:
    return chain[-1] if chain else conversation.begin.whole


def _ids(raw: bytes) -> list[int]:
    return msgspec.json.decode(raw, type=list[int]) if raw else []
