"""Plans the prompt of a request: which recorded ids it reuses, and where its turn will be recorded.

Law, for every plan that continues a recorded turn:

    plan.prompt == ids of that turn + ids that the chat template adds after it

A prompt is planned once, for the model of the fleet; after a failure another replica gets the same plan.
"""

import threading
from dataclasses import dataclass, replace

from proxy.history.cached_turn import CachedTurn
from proxy.history.claims import Claims
from proxy.history.context import check_ids_fit, most_prompt_ids, too_long
from proxy.history.continuation import continue_turn
from proxy.history.conversation import Conversation
from proxy.history.given import append_messages, place_given
from proxy.history.given_images import place_images
from proxy.history.images import ImageModel, LoadedImage, NotLoadable, place, refs_in
from proxy.history.matcher import Match
from proxy.history.placing import UNREADABLE, Placer
from proxy.history.plan import Extended, Given, Placement, PromptPlan, Rendered, ServedModel
from proxy.history.prompts import plan_prompts
from proxy.history.thinking import shows_dropped_thinking
from proxy.history.vocabulary import Reason
from proxy.turn.request import ChatRequest, GivenIds, Rendering, ThinkingPolicy
from tokenization import ChatTokenizer, InvalidMessages, TemplateUnsupported, ids
from tokenization.encoder import Limit
from tokenization.errors import TooManyIds
from tokenization.placeholders import PlaceholdersDiffer

_HINT = (
    " The conversation keeps the exact ids of earlier turns. If the chat template renders it shorter, the "
    "proxy's setting `overflow: render` lets it continue from a new rendering."
)
_EXTENDABLE = (None, Reason.HISTORY_EDITED, Reason.CALL_REPAIRED)


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
            return await plan_prompts(self.placer, request, model, claims)
        if request.given is not None:
            return await self._plan_given(request, request.given, model, claims)
        try:
            conversation = await self.placer.parse(request, request.messages)
            scope = self.placer.scope(request, model)
        except UNREADABLE:
            return Rendered(placement=self.placer.nowhere(request, model), reason=Reason.UNREADABLE)
        match = await self.placer.match(request, conversation, scope, claims)
        placement = self.placer.place(request, model, scope, conversation, match)
        if request.token_route:
            return await self._rendered(request, placement, conversation, Reason.NO_IDS, model)
        if request.special == Reason.IDS_GIVEN:
            # the engine reads them from the request itself
            return Given(placement=placement, reason=Reason.IDS_GIVEN, prompt=b"", reused=0, appended=0)
        reason = match.reason
        if reason != Reason.FIRST_TURN:
            reason = _must_render(request, conversation, model) or match.reason
        plan: PromptPlan | Reason | None = reason
        if match.turn is not None and reason in _EXTENDABLE:
            plan = await self._extend(request, placement, conversation, match, reason, model)
        if isinstance(plan, PromptPlan):
            return plan
        return await self._rendered(request, placement, conversation, plan, model)

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
            images = await self._images(request, conversation, 0, model.images)
        except NotLoadable:
            return Rendered(placement=placement, reason=Reason.MEDIA)
        placeholder = model.images.placeholder
        return Rendered(placement=placement, reason=reason, placeholder=placeholder, images=images)

    async def _images(
        self, request: ChatRequest, conversation: Conversation, first: int, model: ImageModel
    ) -> list[LoadedImage]:
        """The images of the messages from `first` on. Raises BadRequest, NotLoadable."""
        if not any(message.media for message in conversation.messages[first:]):
            return []
        refs = refs_in(conversation.parse(first, len(conversation.raws)), "messages", first)
        return await self.placer.images.load(refs, model, "messages", request.tenant)

    async def plan_prefix(
        self, request: ChatRequest, prompt: bytes, prefix: int, model: ServedModel, claims: Claims
    ) -> PromptPlan:
        """Plan a prompt with `prefix` ids that the client requires, followed by the template's rendering.

        Args:
            prompt: the whole prompt as a compact JSON array.
        """
        placement = await place_given(self.placer, request, prompt, model, claims)
        return Given(
            placement=placement,
            reason=Reason.PREFIX_GIVEN,
            prompt=prompt,
            reused=prefix,
            appended=ids.check(prompt) - prefix,
        )

    async def _plan_given(
        self, request: ChatRequest, given: GivenIds, model: ServedModel, claims: Claims
    ) -> PromptPlan:
        given, images = await place_images(self.placer, request, given, model)
        if request.append is None:
            check_ids_fit(request, given, model)
            prompt = ids.compact(given.raw)
            placement = await place_given(self.placer, request, prompt, model, claims, images)
            return Given(
                placement=placement,
                reason=Reason.IDS_GIVEN,
                prompt=prompt,
                reused=given.count,
                appended=0,
                images=images,
            )
        whole = await append_messages(self.placer, request, given, model)
        images = (*images, *whole.images)
        placement = await place_given(self.placer, request, whole.prompt, model, claims, images)
        return Extended(
            placement=placement,
            prompt=whole.prompt,
            reused=given.count,
            appended=whole.appended,
            images=images,
        )

    async def _extend(
        self,
        request: ChatRequest,
        placement: Placement,
        conversation: Conversation,
        match: Match,
        reason: Reason | None,
        model: ServedModel,
    ) -> PromptPlan | Reason:
        """Extend recorded ids with the template's suffix; the reason to render if the suffix is not certain.

        Raises:
            BadRequest: the prompt is longer than the context, and `renders_overflow` is off; or an image is
                invalid.
        """
        turn, tokenizer = match.turn, model.tokenizer
        assert turn is not None and tokenizer is not None  # checked by the caller
        if obstacle := _no_extension(turn, conversation, tokenizer, request.rendering):
            return obstacle
        if turn.images and model.images is None:
            return Reason.MEDIA
        if (request.thinking or self.thinking) is ThinkingPolicy.TEMPLATE:
            try:
                if await self._shows_dropped_thinking(request, conversation, match, tokenizer):
                    return Reason.THINKING_DROPPED
            except InvalidMessages:
                return Reason.TEMPLATE_REFUSED
        try:
            prompt, appended = await self._append(request, conversation, match.end, turn, tokenizer, model)
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
        images = turn.images
        if model.images is not None and conversation.media:
            try:
                loaded = await self._images(request, conversation, match.end + 1, model.images)
                appended, placed = place(appended, model.images, loaded, turn.count)
            except (NotLoadable, PlaceholdersDiffer):
                return Reason.MEDIA
            prompt, images = ids.join(turn.ids, appended), (*images, *placed)
        if turn.rollout == placement.session.id:
            placement = replace(placement, parent=turn, first_new=match.end + 1)
        return Extended(
            placement=placement,
            reason=reason,
            prompt=prompt,
            reused=turn.count,
            appended=appended,
            images=images,
        )

    async def _shows_dropped_thinking(
        self, request: ChatRequest, conversation: Conversation, match: Match, tokenizer: ChatTokenizer
    ) -> bool:
        """Whether the ids to extend hold reasoning that the template leaves out by now.

        Raises:
            InvalidMessages: the template refuses the messages.
            Overloaded: the limit of concurrent work is reached.
        """
        turn = match.turn
        assert turn is not None  # checked by the caller
        size = sum(memoryview(raw).nbytes for raw in conversation.raws)
        return await self.placer.encoders.run(
            lambda: shows_dropped_thinking(tokenizer, turn, conversation, match.end, request.rendering),
            size,
            tenant=request.tenant,
        )

    async def _append(
        self,
        request: ChatRequest,
        conversation: Conversation,
        end: int,
        turn: CachedTurn,
        tokenizer: ChatTokenizer,
        model: ServedModel,
    ) -> tuple[bytes, list[int]]:
        """The prompt that extends a turn by the messages after `end`, and the ids that these add.

        Raises:
            TooManyIds: the prompt is longer than the context.
            TemplateUnsupported: the suffix is not certain.
            InvalidMessages: the template refuses the messages.
            Overloaded: the limit of concurrent tokenising is reached.
        """
        size = sum(memoryview(raw).nbytes for raw in conversation.raws[end + 1 :])
        stop = threading.Event()
        limit = Limit(self._most_ids(request, turn.count, model), stop.is_set)
        rendering, auditor = request.rendering, self.placer.auditor

        def extend() -> tuple[bytes, list[int]]:
            return continue_turn(tokenizer, turn, conversation, end, rendering, auditor, limit)

        return await self.placer.encoders.run(extend, size, tokenises=True, tenant=request.tenant, stop=stop)

    def _most_ids(self, request: ChatRequest, reused: int, model: ServedModel) -> int | None:
        """The most ids to append to those of a turn; None if the engine reports no limit."""
        if model.max_model_len is None:
            return None
        # only a prompt that cannot fit is an error; the engine refuses one without room for the completion
        whole = (
            most_prompt_ids(request, model.max_model_len) if self.renders_overflow else model.max_model_len
        )
        return whole - reused


def _no_extension(
    turn: CachedTurn, conversation: Conversation, tokenizer: ChatTokenizer, rendering: Rendering
) -> Reason | None:
    """Why the ids of a turn cannot be extended for a conversation; None if they can."""
    if not turn.usable:
        return Reason.UNUSABLE_TURN
    if conversation.ends_with_assistant:
        return Reason.ENDS_WITH_ASSISTANT
    if tokenizer.reserved(rendering.parse_template_kwargs()):
        return Reason.SPECIAL_REQUEST
    return None


def _must_render(request: ChatRequest, conversation: Conversation, model: ServedModel) -> Reason | None:
    """The reason why the engine must render this request in any case; None if there is none."""
    if request.special:
        return Reason(request.special)
    if conversation.media:
        return Reason.MEDIA if model.images is None else model.no_tokenizer
    return model.refused or model.no_tokenizer
