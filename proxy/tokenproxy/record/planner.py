"""Plans the prompt of a request: which recorded ids it reuses, and where its turn will be recorded.

Law, for every plan that continues a recorded turn:

    plan.prompt == ids of that turn + ids that the chat template adds after it

A prompt is planned once, for the model of the fleet; after a failure another replica gets the same plan.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import msgspec
from msgspec.structs import replace

from chat_tokenizer import ChatTokenizer, InvalidMessages, TemplateUnsupported, TokenizationError, ids
from chat_tokenizer.cache import BoundedCache, digest
from chat_tokenizer.encoder import Limit
from chat_tokenizer.equivalences import Equivalents, equivalents
from chat_tokenizer.errors import TooManyIds
from chat_tokenizer.placeholders import PlaceholdersDiffer
from tokenproxy.base.errors import RendererUnavailable
from tokenproxy.base.request import ChatRequest, Rendering, ThinkingPolicy
from tokenproxy.record.appending import (
    Appended,
    Auditor,
    Continuation,
    Messages,
    check_ids_fit,
    is_truncated,
    most_prompt_ids,
    shows_dropped_thinking,
    suffix,
    too_long,
)
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.claims import Claims
from tokenproxy.record.encoders import WORTH_A_THREAD_BYTES
from tokenproxy.record.identity import Conversation, Scope, scope_parts
from tokenproxy.record.images import ImageLoader, ImageModel, NotLoadable, expand_images, refs_in
from tokenproxy.record.lenient import messages_after
from tokenproxy.record.match import Match, Matcher
from tokenproxy.record.plan import PromptPlan, ServedModel, place, place_nowhere
from tokenproxy.record.store import StoreError
from tokenproxy.record.store_time import add_store_time
from tokenproxy.record.turn import PromptImage, new_id
from tokenproxy.record.vocabulary import Reason, Source

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TokenizationError)
"""Raised for messages, tools or template arguments that are not those of a chat completion."""

_HINT = (
    " The conversation keeps the exact ids of earlier turns. If the chat template renders it shorter, the "
    "proxy's setting `overflow: render` lets it continue from a new rendering."
)
_RECALLED_ON_THREAD_BYTES = 2**18
"""Bytes of messages from which a thread finds out how many are known. It takes 0.15 ms for so many, hardly
more than handing it to a thread."""
_PROMPT_S = 0.02
"""Seconds that a request waits longer for the store for each prompt after the first."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans prompts. One per application."""

    matcher: Matcher
    auditor: Auditor
    images: ImageLoader
    thinking: ThinkingPolicy = ThinkingPolicy.KEEP
    """For requests that set none."""
    renders_overflow: bool = False
    """Whether a conversation whose ids exceed the context is rendered anew; if not, it is an error."""
    _read: BoundedCache[bytes, tuple[tuple[bytes, ...], Equivalents]] = field(
        default_factory=lambda: BoundedCache(1024)
    )
    """The parts of scopes, and the defaults of tools, by a digest of what they are read from."""

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
        try:
            conversation, scope = await self.identify(request, request.messages, model)
        except UNREADABLE:
            return replace(place_nowhere(request, model), reason=Reason.UNREADABLE)
        match = await self.matcher.match(request, conversation, scope, claims)
        plan = place(request, model, scope, conversation, match)
        refusal: Reason | None = None
        if request.token_route:
            refusal = Reason.NO_IDS
        elif request.special == Reason.IDS_GIVEN:
            # the engine reads them from the request itself
            return replace(plan, source=Source.GIVEN, reason=Reason.IDS_GIVEN)
        elif match.reason is not Reason.FIRST_TURN:
            refusal = _must_render(request, conversation, match.turn, model)
        if refusal is None and match.turn is not None:
            extended = await self._extend(plan, conversation, match.turn, model)
            if isinstance(extended, PromptPlan):
                return extended
            refusal = extended
        plan = replace(plan, reason=refusal) if refusal is not None else plan
        if conversation.media and model.images is not None and plan.conversation is not None:
            return await self._with_images(plan, conversation, model.images)
        return plan

    async def identify(
        self, request: ChatRequest, messages: bytes, model: ServedModel
    ) -> tuple[Conversation, Scope]:
        """The conversation in a JSON array of messages, and its scope on an engine.

        Raises one of `UNREADABLE`, or Overloaded.
        """
        name = request.model or model.name
        parts, defaults = await self._parts(request.rendering, name, model)
        session = request.session.name if request.session is not None and request.session.explicit else None
        cache, run = self.matcher.cache, self.matcher.encoders.run
        recall = partial(cache.recall, messages, defaults)
        recalled = recall() if len(messages) < _RECALLED_ON_THREAD_BYTES else await run(recall, len(messages))
        parse = partial(cache.parse, recalled)
        size = len(recalled.data) - (recalled.ends[-1] if recalled.ends else 0)
        conversation = parse() if size < WORTH_A_THREAD_BYTES else await run(parse, size)
        return conversation, Scope(request.tenant, session, name, parts)

    async def _parts(
        self, rendering: Rendering, name: str, model: ServedModel
    ) -> tuple[tuple[bytes, ...], Equivalents]:
        """The parts of a scope, and the defaults of the tools. Raises as `identify`."""
        tokenizer = model.tokenizer
        fingerprint = tokenizer.fingerprint if tokenizer else ""
        options, fields = [*rendering.options.items()], model.rendered_fields
        key = digest(rendering.tools, rendering.template_kwargs, options, fields, name, fingerprint)
        made = self._read.get(key)
        if made is None:
            # on a thread also because the first call tries the template
            read = partial(_read, rendering, fields, name, tokenizer)
            made = await self.matcher.encoders.run(read, rendering.size)
            self._read.put(key, made)
        return made

    async def _with_images(
        self, plan: PromptPlan, conversation: Conversation, model: ImageModel
    ) -> PromptPlan:
        """Find out the ids of the images of a rendering: they tell where these are in the prompt.

        Raises:
            BadRequest: an image is invalid.
        """
        try:
            refs = refs_in(conversation.parse(), "messages")
            images = await self.images.load(refs, model, "messages")
        except NotLoadable:
            return replace(plan, reason=Reason.MEDIA)
        return replace(plan, rendered_images=images, placeholder=model.placeholder)

    async def _extend(
        self, plan: PromptPlan, conversation: Conversation, turn: CachedTurn, model: ServedModel
    ) -> PromptPlan | Reason:
        """Extend recorded ids with the template's suffix; the reason to render if the suffix is not certain.

        Raises:
            BadRequest: the prompt is longer than the context, and `renders_overflow` is off; or an image is
                invalid.
        """
        request, match, tokenizer = plan.request, plan.match, model.tokenizer
        assert tokenizer is not None  # checked by the caller
        first, whole = match.end + 1, model.max_model_len
        if whole is not None and self.renders_overflow:
            # else only a prompt that cannot fit is an error; the engine refuses one without room for more
            whole = most_prompt_ids(request, whole)
        new = Continuation(
            turn.ids,
            turn.count,
            turn,
            "messages",
            first,
            partial(messages_after, conversation, match.end, turn, match.message),
            any(message.media for message in conversation.messages[first:]),
            conversation.size(first),
        )
        try:
            if (request.thinking or self.thinking) is ThinkingPolicy.TEMPLATE:
                arguments = (tokenizer, turn, conversation, match.end, request.rendering)
                drops = partial(shows_dropped_thinking, *arguments)
                if await self.matcher.encoders.run(drops, conversation.size()):
                    return Reason.THINKING_DROPPED
            most_ids = None if whole is None else whole - turn.count
            made = await self.append(request.rendering, model, new, most_ids)
        except TooManyIds as error:
            if self.renders_overflow:
                return Reason.CONTEXT_OVERFLOW
            count = turn.count + error.count
            raise too_long(model, count, "messages", at_least=error.at_least, hint=_HINT) from error
        except TemplateUnsupported:
            return Reason.TEMPLATE_UNSUPPORTED
        except InvalidMessages:
            return Reason.TEMPLATE_REFUSED
        except (NotLoadable, PlaceholdersDiffer):
            return Reason.MEDIA
        except RendererUnavailable:
            return Reason.RENDERER_UNAVAILABLE
        same = turn.rollout == plan.session.id
        return replace(
            plan,
            parent=turn if same else None,
            first_new=first if same else 0,
            source=Source.EXTENDED,
            prompt=made.prompt,
            reused=turn.count,
            appended=made.appended,
            images=(*turn.images, *made.images),
        )

    async def append(
        self, rendering: Rendering, model: ServedModel, new: Continuation, most_ids: int | None
    ) -> Appended:
        """The prompt that continues ids with new messages.

        Args:
            most_ids: the most ids to append; None for any number.

        Raises:
            TooManyIds: there are more.
            TokenizationError: as `ChatTokenizer.append`; PlaceholdersDiffer if the appended ids hold
                another number of images than the messages.
            NotLoadable: the messages hold other media, or an image that the proxy does not load.
            BadRequest: an image is invalid.
            Overloaded: the limit of concurrent tokenising is reached.
        """
        stop, tokenizer = Event(), model.tokenizer
        assert tokenizer is not None  # checked by the caller
        limit = Limit(most_ids, stop.is_set)

        def extend() -> tuple[list[int], Messages]:
            messages, history = new.parse()
            appended = suffix(tokenizer, new.ids, new.turn, messages, rendering, history, limit)
            if history is not None:
                self.auditor.consider(tokenizer, history, messages, rendering)
            return appended, messages

        appended, messages = await self.matcher.encoders.run(extend, new.size, tokenises=True, stop=stop)
        images: list[PromptImage] = []
        if model.images is not None and (new.media or model.images.placeholder in appended):
            refs = refs_in(messages, new.field, new.first) if new.media else []
            loaded = await self.images.load(refs, model.images, new.field)
            appended, images = expand_images(appended, model.images, loaded, new.count)
        return Appended(ids.join(new.ids, appended), len(appended), images)

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
        conversation, scope = await self.identify(request, b"", model)
        add_store_time(_PROMPT_S * (len(request.prompts) - 1))
        for given in request.prompts:
            if plans:
                await asyncio.sleep(0)  # a store in memory never waits: other requests run in between
            fixed = given is not None and not request.special and not is_truncated(request)
            prompt, match = ids.compact(given.raw) if given is not None and fixed else b"", Match()
            if prompt and responds:
                try:
                    match = await self.matcher.match_ids(request, prompt, scope, claims)
                except StoreError as error:
                    responds = False  # the other prompts do not wait for it
                    error.report(self.matcher.metrics, "turns are recorded without the ones before them")
            plan = place(request, model, scope, conversation, match)
            same = match.turn is not None and match.turn.rollout == plan.session.id
            plan = replace(plan, turn_id=request_id, parent=match.turn if same else None)
            if given is not None and prompt:
                plan = replace(plan, source=Source.GIVEN, prompt=prompt, reused=given.count)
                reason = Reason.IDS_GIVEN
            elif request.special or given is not None:
                reason = Reason.SPECIAL_REQUEST
            else:
                reason = Reason.MEDIA if request.prompt_media else Reason.TEXT_PROMPT
            plans.append(replace(plan, reason=reason))
        existing = {each.session.id for each in plans if not each.new_rollout}
        for rollout in existing if request.record else ():
            if not await claims.pin(rollout):
                break
        return replace(plans[0], others=tuple(plans[1:]))


def _read(
    rendering: Rendering, rendered_fields: frozenset[str], name: str, tokenizer: ChatTokenizer | None
) -> tuple[tuple[bytes, ...], Equivalents]:
    """See `Planner._parts`."""
    tools = rendering.parse_tools() if b'"default"' in rendering.tools else None
    parts = scope_parts(rendering, rendered_fields, name, tokenizer.fingerprint if tokenizer else "")
    return parts, equivalents(tools or (), tokenizer.unprinted if tokenizer else None)


def _must_render(
    request: ChatRequest, conversation: Conversation, turn: CachedTurn | None, model: ServedModel
) -> Reason | None:
    """The reason why the engine must render this request; None if there is none.

    Args:
        turn: the turn that it continues; None if none was found.
    """
    refused = None if conversation.media else model.refused
    if conversation.media and model.images is None:
        refused = Reason.MEDIA
    if request.special:
        refused = Reason(request.special)
    if refused is not None or model.tokenizer is None:
        code = model.tokenizer_error.code if model.tokenizer_error else None
        return refused or (Reason(code) if code in set(Reason) else Reason.NO_TOKENIZER)
    if turn is None:
        return None
    if not turn.usable:
        return Reason.UNUSABLE_TURN
    if conversation.ends_with_assistant:
        return Reason.ENDS_WITH_ASSISTANT
    if model.tokenizer.reserved(request.rendering.parse_template_kwargs()):
        return Reason.SPECIAL_REQUEST
    return Reason.MEDIA if turn.images and model.images is None else None
