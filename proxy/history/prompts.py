"""Plans requests whose prompts are ids or texts, not messages: completions and generate.

Each prompt is a turn: its ids are found in the record, and where they continue a recorded turn, the turn
belongs to that rollout. Otherwise it starts a new one, or a new tree in the session that the request names.
"""

from dataclasses import dataclass, replace

from proxy.history.claims import Claims
from proxy.history.context import check_ids_fit, is_truncated
from proxy.history.conversation import Conversation
from proxy.history.matcher import Match
from proxy.history.placing import Placer
from proxy.history.plan import Given, Placement, PromptPlan, Rendered, ServedModel
from proxy.history.scope import Scope
from proxy.history.store import StoreError
from proxy.history.store_time import add_store_time
from proxy.history.turn import new_id
from proxy.history.vocabulary import Reason
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import ids

_PROMPT_S = 0.02
"""Seconds that a request waits longer for the store for each prompt after the first."""


async def plan_prompts(
    placer: Placer, request: ChatRequest, model: ServedModel, claims: Claims
) -> PromptPlan:
    """The plan of the first prompt of a request, which holds those of the others.

    Raises:
        BadRequest: a prompt is longer than the model's context.
    """
    for given in request.prompts:
        if given is not None:
            check_ids_fit(request, given, model)
    plans: list[PromptPlan] = []
    request_id, record = new_id(), _Record(placer, claims)
    add_store_time(_PROMPT_S * (len(request.prompts) - 1))
    for given in request.prompts:
        plan = await _plan_prompt(record, request, given, model)
        plans.append(replace(plan, placement=replace(plan.placement, turn_id=request_id)))
    for rollout in _existing_rollouts(request, plans) if request.record else ():
        if not await claims.pin(rollout):
            break
    return replace(plans[0], others=tuple(plans[1:]))


@dataclass(slots=True)
class _Record:
    """The recorded turns, as one request searches them."""

    placer: Placer
    claims: Claims
    responds: bool = True
    """False after the store did not respond: the other prompts of the request do not wait for it."""

    async def match(self, request: ChatRequest, prompt: bytes, scope: Scope) -> Match:
        """The turn that a prompt continues; none if the store does not respond."""
        if not prompt or not self.responds:
            return Match()
        try:
            return await self.placer.match_ids(request, prompt, scope, self.claims)
        except StoreError as error:
            self.responds = False
            error.report(self.placer.metrics, "turns are recorded without the ones before them")
            return Match()


async def _plan_prompt(
    record: _Record, request: ChatRequest, given: GivenIds | None, model: ServedModel
) -> PromptPlan:
    if given is None or is_truncated(request) or request.special:
        placement = await _place(record, request, b"", model)
        reason = Reason.TEXT_PROMPT
        if request.special or given is not None:
            reason = Reason.SPECIAL_REQUEST
        elif request.prompt_media:
            reason = Reason.MEDIA
        return Rendered(placement=placement, reason=reason)
    prompt = ids.compact(given.raw)
    placement = await _place(record, request, prompt, model)
    return Given(placement=placement, reason=Reason.IDS_GIVEN, prompt=prompt, reused=given.count, appended=0)


async def _place(record: _Record, request: ChatRequest, prompt: bytes, model: ServedModel) -> Placement:
    """Find where the turn of a prompt is recorded.

    Args:
        prompt: a compact JSON array of ids; empty if the ids are not known yet.
    """
    placer = record.placer
    if not request.record:
        return placer.nowhere(request, model)
    scope = placer.scope(request, model)
    match = await record.match(request, prompt, scope)
    placement = placer.place(request, model, scope, Conversation((), ()), match)
    parent = match.turn
    if parent is not None and parent.rollout != placement.session.id:
        parent = None
    return replace(placement, parent=parent, findable=False, found_by_ids=True)


def _existing_rollouts(request: ChatRequest, plans: list[PromptPlan]) -> set[str]:
    """The rollouts of the plans that the store may hold already."""
    named = request.session is not None
    return {plan.placement.session.id for plan in plans if named or not plan.placement.new_rollout}
