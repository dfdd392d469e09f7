"""Plans the prompt of a request: which recorded ids it reuses, and where its turn will be recorded.

Law, for every plan that continues a recorded turn:

    plan.prompt == ids of that turn, then the ids that the chat template puts after it

Planning changes nothing in the request: after a failure it is planned anew for another engine.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from proxy.history.continuation import continue_turn
from proxy.history.conversation import Conversation
from proxy.history.given import append_messages, place_given
from proxy.history.matcher import Match
from proxy.history.placing import UNREADABLE, Placer
from proxy.history.plan import Extended, Given, Placement, PromptPlan, Rendered, ServedModel
from proxy.history.vocabulary import Reason
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import InvalidMessages, TemplateUnsupported, ids

_EXTENDABLE = (None, Reason.HISTORY_EDITED, Reason.CALL_REPAIRED)


@dataclass(slots=True)
class Planner:
    """Plans prompts. One per application."""

    placer: Placer

    async def plan(self, request: ChatRequest, model: ServedModel) -> PromptPlan:
        """How the prompt of a request is made.

        On the chat route whatever goes wrong is a reason to render. On the token route, where nothing can be
        rendered instead, it is an error.

        Raises:
            BadRequest: the template refuses the messages to append.
            Unsupported: messages cannot be appended exactly.
        """
        if request.given is not None:
            return await self._plan_given(request, request.given, model)
        try:
            conversation = await self.placer.parse(request.messages)
            scope = self.placer.scope(request, model)
        except UNREADABLE:
            return Rendered(placement=self.placer.nowhere(request, model), reason=Reason.UNREADABLE)
        match = await self.placer.match(request, conversation, scope)
        placement = self.placer.place(request, model, scope, conversation, match)
        async with self.placer.released_on_error(placement):
            return await self._plan_chat(request, conversation, match, placement, model)

    async def _plan_chat(
        self,
        request: ChatRequest,
        conversation: Conversation,
        match: Match,
        placement: Placement,
        model: ServedModel,
    ) -> PromptPlan:
        if request.token_route:
            return Rendered(placement=placement, reason=Reason.NO_IDS)
        if request.special == Reason.IDS_GIVEN:
            # the engine takes them from the request itself
            return Given(placement=placement, reason=Reason.IDS_GIVEN, prompt=b"", reused=0, appended=0)
        reason = match.reason
        if reason != Reason.FIRST_TURN:
            reason = _must_render(request, conversation, model) or match.reason
        if match.turn is None or reason not in _EXTENDABLE:
            return Rendered(placement=placement, reason=reason)
        return await self._extend(placement, conversation, match, reason, model)

    async def plan_prefix(
        self, request: ChatRequest, prompt: bytes, prefix: int, model: ServedModel
    ) -> PromptPlan:
        """A prompt whose first `prefix` ids the client requires; the rest is the template's rendering.

        Args:
            prompt: the whole prompt as a compact JSON array.
        """
        placement = await place_given(self.placer, request, prompt, model)
        return Given(
            placement=placement,
            reason=Reason.PREFIX_GIVEN,
            prompt=prompt,
            reused=prefix,
            appended=ids.check(prompt) - prefix,
        )

    def released_on_error(self, plan: PromptPlan) -> AbstractAsyncContextManager[None]:
        """Release a plan if what is done with it fails or is cancelled."""
        return self.placer.released_on_error(plan.placement)

    async def release(self, plan: PromptPlan) -> None:
        """Let others continue the turn that a plan claimed: no turn of the plan was recorded."""
        await self.placer.release(plan.placement)

    async def _plan_given(self, request: ChatRequest, given: GivenIds, model: ServedModel) -> PromptPlan:
        if request.append is None:
            prompt = ids.compact(given.raw)
            placement = await place_given(self.placer, request, prompt, model)
            return Given(
                placement=placement, reason=Reason.IDS_GIVEN, prompt=prompt, reused=given.count, appended=0
            )
        prompt, appended = await append_messages(self.placer, request, given, model)
        placement = await place_given(self.placer, request, prompt, model)
        return Extended(placement=placement, prompt=prompt, reused=given.count, appended=appended)

    async def _extend(
        self,
        placement: Placement,
        conversation: Conversation,
        match: Match,
        reason: Reason | None,
        model: ServedModel,
    ) -> PromptPlan:
        """Recorded ids, and what the template puts after them; rendered if that is not certain."""
        turn, tokenizer = match.turn, model.tokenizer
        assert turn is not None and tokenizer is not None  # the caller looked
        rendering = placement.scope.rendering
        if not turn.usable:
            return Rendered(placement=placement, reason=Reason.UNUSABLE_TURN)
        if conversation.ends_with_assistant:
            return Rendered(placement=placement, reason=Reason.ENDS_WITH_ASSISTANT)
        if tokenizer.reserved(rendering.parse_template_kwargs()):
            return Rendered(placement=placement, reason=Reason.SPECIAL_REQUEST)
        try:
            prompt, appended = await self.placer.in_thread(
                lambda: continue_turn(
                    tokenizer, turn, conversation, match.end, rendering, self.placer.auditor
                )
            )
        except TemplateUnsupported:
            return Rendered(placement=placement, reason=Reason.TEMPLATE_UNSUPPORTED)
        except InvalidMessages:
            return Rendered(placement=placement, reason=Reason.TEMPLATE_REFUSED)
        if turn.rollout == placement.session.id:
            placement = replace(placement, parent=turn, first_new=match.end + 1)
        return Extended(
            placement=placement, reason=reason, prompt=prompt, reused=turn.count, appended=appended
        )


def _must_render(request: ChatRequest, conversation: Conversation, model: ServedModel) -> Reason | None:
    """Why the engine must render this request, whatever was recorded."""
    if request.special:
        return Reason(request.special)
    if conversation.media:
        return Reason.MEDIA
    return model.refused or model.no_tokenizer
