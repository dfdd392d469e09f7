"""Plans the prompt of a request: which recorded ids it reuses, and where its turn will be recorded.

Law, for every plan that continues a recorded turn:

    plan.prompt == ids of that turn + ids that the chat template adds after it

A prompt is planned once, for the model of the fleet; after a failure another replica gets the same plan.
"""

import asyncio
from dataclasses import dataclass, replace

from chat_tokenizer import InvalidMessages, TemplateUnsupported, ids
from chat_tokenizer.errors import TooManyIds
from chat_tokenizer.placeholders import PlaceholdersDiffer
from tokenproxy.base.errors import RendererUnavailable
from tokenproxy.base.request import ChatRequest, GivenIds, ThinkingPolicy
from tokenproxy.record.appending import (
    NewMessages,
    append,
    is_truncated,
    most_prompt_ids,
    prefix_of,
    shows_dropped_thinking,
    too_long,
)
from tokenproxy.record.claims import Claims
from tokenproxy.record.conversation import Conversation
from tokenproxy.record.given import check_ids_fit, place_given, plan_given
from tokenproxy.record.images import NotLoadable, refs_in
from tokenproxy.record.match import Match
from tokenproxy.record.placing import UNREADABLE, Placer
from tokenproxy.record.plan import Extended, Given, Placement, PromptPlan, Rendered, ServedModel
from tokenproxy.record.store import StoreError
from tokenproxy.record.store_time import add_store_time
from tokenproxy.record.turn import new_id
from tokenproxy.record.vocabulary import Reason

_HINT = (
    " The conversation keeps the exact ids of earlier turns. If the chat template renders it shorter, the "
    "proxy's setting `overflow: render` lets it continue from a new rendering."
)
_EXTENDABLE = (None, Reason.HISTORY_EDITED, Reason.CALL_REPAIRED)
_PROMPT_S = 0.02
"""Seconds that a request waits longer for the store for each prompt after the first."""


@dataclass(slots=True)
class Planner:
    """Plans prompts. One per application."""

    placer: Placer
    thinking: ThinkingPolicy = ThinkingPolicy.KEEP
    """For requests that set none."""
    renders_overflow: bool = False
    """Whether a conversation whose ids exceed the context is rendered anew; if not, it is an error."""

    async def plan(self, request: ChatRequest, model: ServedModel, claims: Claims) -> PromptPlan:
        """Plan the prompt of a request.

        On the chat route, if exact ids cannot be used, the engine renders the prompt, and the plan holds the
        reason. On the token route, where no rendering can replace the ids, it is an error.

        Raises:
            BadRequest: the template refuses the messages to append, or the prompt is longer than the context.
            Overloaded: the limit of concurrent tokenising is reached.
            Unsupported: messages cannot be appended exactly.
        """
        if request.prompts:
            return await self._plan_prompts(request, model, claims)
        if request.given is not None:
            return await plan_given(self.placer, request, request.given, model, claims)
        try:
            conversation, scope = await self.placer.identify(request, request.messages, model)
        except UNREADABLE:
            return Rendered(placement=self.placer.nowhere(request, model), reason=Reason.UNREADABLE)
        match = await self.placer.match(request, conversation, scope, claims)
        placement = self.placer.place(request, model, scope, conversation, match)
        reason = match.reason
        if request.token_route:
            reason = Reason.NO_IDS
        elif request.special == Reason.IDS_GIVEN:
            # the engine reads them from the request itself
            return Given(placement=placement, reason=Reason.IDS_GIVEN, prompt=b"", reused=0, appended=0)
        elif reason != Reason.FIRST_TURN:
            reason = _must_render(request, conversation, model) or reason
        if match.turn is not None and reason in _EXTENDABLE:
            plan = await self._extend(request, placement, conversation, match, reason, model)
            if isinstance(plan, Extended):
                return plan
            reason = plan
        return await self._rendered(request, placement, conversation, reason, model)

    async def plan_prefix(
        self, request: ChatRequest, prompt: bytes, prefix: int, model: ServedModel, claims: Claims
    ) -> PromptPlan:
        """Plan a prompt with `prefix` ids that the client requires, followed by the template's rendering.

        Args:
            prompt: the whole prompt as a compact JSON array.
        """
        placement = await place_given(self.placer, request, prompt, model, claims)
        appended = ids.check(prompt) - prefix
        reason = Reason.PREFIX_GIVEN
        return Given(placement=placement, reason=reason, prompt=prompt, reused=prefix, appended=appended)

    async def _rendered(
        self,
        request: ChatRequest,
        placement: Placement,
        conversation: Conversation,
        reason: Reason | None,
        model: ServedModel,
    ) -> Rendered:
        """Plan a rendering, and find out the ids of its images: they tell where these are in the prompt.

        Raises:
            BadRequest: an image is invalid.
        """
        if not conversation.media or model.images is None or placement.conversation is None:
            return Rendered(placement=placement, reason=reason)
        try:
            refs = refs_in(conversation.parse(0, len(conversation.raws)), "messages")
            images = await self.placer.images.load(refs, model.images, "messages")
        except NotLoadable:
            return Rendered(placement=placement, reason=Reason.MEDIA)
        placeholder = model.images.placeholder
        return Rendered(placement=placement, reason=reason, placeholder=placeholder, images=images)

    async def _extend(
        self,
        request: ChatRequest,
        placement: Placement,
        conversation: Conversation,
        match: Match,
        reason: Reason | None,
        model: ServedModel,
    ) -> Extended | Reason:
        """Extend recorded ids with the template's suffix; the reason to render if the suffix is not certain.

        Raises:
            BadRequest: the prompt is longer than the context, and `renders_overflow` is off; or an image is
                invalid.
        """
        turn, tokenizer, rendering = match.turn, model.tokenizer, request.rendering
        assert turn is not None and tokenizer is not None  # checked by the caller
        if not turn.usable:
            return Reason.UNUSABLE_TURN
        if conversation.ends_with_assistant:
            return Reason.ENDS_WITH_ASSISTANT
        if tokenizer.reserved(rendering.parse_template_kwargs()):
            return Reason.SPECIAL_REQUEST
        if turn.images and model.images is None:
            return Reason.MEDIA
        first, last = match.end + 1, len(conversation.raws)
        sizes = [memoryview(raw).nbytes for raw in conversation.raws]
        new = NewMessages(
            "messages",
            first,
            lambda: (conversation.parse(first, last), conversation.history(first)),
            any(message.media for message in conversation.messages[first:]),
            sum(sizes[first:]),
        )
        most_ids = None
        if model.max_model_len is not None:
            # only a prompt that cannot fit is an error; the engine refuses one without room for a completion
            whole = model.max_model_len
            if self.renders_overflow:
                whole = most_prompt_ids(request, model.max_model_len)
            most_ids = whole - turn.count
        try:
            if (request.thinking or self.thinking) is ThinkingPolicy.TEMPLATE:
                drops = await self.placer.encoders.run(
                    lambda: shows_dropped_thinking(tokenizer, turn, conversation, match.end, rendering),
                    sum(sizes),
                )
                if drops:
                    return Reason.THINKING_DROPPED
            made = await append(self.placer, request, model, tokenizer, prefix_of(turn), new, most_ids)
        except TooManyIds as error:
            if self.renders_overflow:
                return Reason.CONTEXT_OVERFLOW
            assert model.max_model_len is not None  # else there is no limit
            count = turn.count + error.count
            raise too_long(
                count, model.max_model_len, "messages", at_least=error.at_least, hint=_HINT
            ) from error
        except TemplateUnsupported:
            return Reason.TEMPLATE_UNSUPPORTED
        except InvalidMessages:
            return Reason.TEMPLATE_REFUSED
        except (NotLoadable, PlaceholdersDiffer):
            return Reason.MEDIA
        except RendererUnavailable:
            return Reason.RENDERER_UNAVAILABLE
        if turn.rollout == placement.session.id:
            placement = replace(placement, parent=turn, first_new=first)
        return Extended(
            placement=placement,
            reason=reason,
            prompt=made.prompt,
            reused=turn.count,
            appended=made.appended,
            images=(*turn.images, *made.images),
        )

    async def _plan_prompts(self, request: ChatRequest, model: ServedModel, claims: Claims) -> PromptPlan:
        """Plan prompts that are ids or texts (completions, generate): that of the first holds the others.

        Where the ids of a prompt continue a recorded turn, its turn belongs to that rollout. Otherwise it
        starts a new one, or a new tree in the session that the request names.

        Raises:
            BadRequest: a prompt is longer than the model's context.
        """
        for given in request.prompts:
            if given is not None:
                check_ids_fit(request, given, model)
        plans: list[PromptPlan] = []
        request_id, responds = new_id(), request.record
        conversation, scope = await self.placer.identify(request, b"", model)
        add_store_time(_PROMPT_S * (len(request.prompts) - 1))
        for given in request.prompts:
            if plans:
                await asyncio.sleep(0)  # a store in memory never waits: other requests run in between
            fixed = given is not None and not request.special and not is_truncated(request)
            prompt, match = ids.compact(given.raw) if given is not None and fixed else b"", Match()
            if prompt and responds:
                try:
                    match = await self.placer.match_ids(request, prompt, scope, claims)
                except StoreError as error:
                    responds = False  # the other prompts do not wait for it
                    error.report(self.placer.metrics, "turns are recorded without the ones before them")
            placement = self.placer.place(request, model, scope, conversation, match)
            same = match.turn is not None and match.turn.rollout == placement.session.id
            placement = replace(
                placement, turn_id=request_id, parent=match.turn if same else None, found_by_ids=True
            )
            plans.append(_plan_prompt(request, placement, given, prompt))
        existing = {each.placement.session.id for each in plans if not each.placement.new_rollout}
        for rollout in existing if request.record else ():
            if not await claims.pin(rollout):
                break
        return replace(plans[0], others=tuple(plans[1:]))


def _plan_prompt(
    request: ChatRequest, placement: Placement, given: GivenIds | None, prompt: bytes
) -> PromptPlan:
    """The plan of a prompt without messages; `prompt` is empty if the engine makes its ids."""
    if given is not None and prompt:
        reason, count = Reason.IDS_GIVEN, given.count
        return Given(placement=placement, reason=reason, prompt=prompt, reused=count, appended=0)
    reason = Reason.MEDIA if request.prompt_media else Reason.TEXT_PROMPT
    if request.special or given is not None:
        reason = Reason.SPECIAL_REQUEST
    return Rendered(placement=placement, reason=reason)


def _must_render(request: ChatRequest, conversation: Conversation, model: ServedModel) -> Reason | None:
    """The reason why the engine must render this request in any case; None if there is none."""
    if request.special:
        return Reason(request.special)
    if conversation.media:
        return Reason.MEDIA if model.images is None else model.no_tokenizer
    return model.refused or model.no_tokenizer
