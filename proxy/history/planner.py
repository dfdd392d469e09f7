"""Plans the prompt of a request: which recorded ids it reuses, and where its turn will be recorded.

Law, for every plan that continues a recorded turn:

    plan.prompt == ids of that turn, then the ids that the chat template puts after it

Planning changes nothing in the request: after a failure it is planned anew for another engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from proxy.errors import BadRequest, Unsupported
from proxy.history.cache import TurnCache
from proxy.history.cached_turn import CachedTurn
from proxy.history.continuation import continue_ids, continue_turn
from proxy.history.conversation import Conversation
from proxy.history.matcher import Match, Matcher
from proxy.history.pins import Pins
from proxy.history.plan import Extended, Given, Placement, PromptPlan, Rendered, ServedModel
from proxy.history.scope import Scope, raw_key, scope_parts
from proxy.history.store import Session, Store, StoreError, session_id
from proxy.history.turn import new_id
from proxy.history.vocabulary import Reason
from proxy.metrics import Metrics
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import (
    ChatTokenizer,
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizationError,
    ids,
)
from tokenization.cache import BoundedCache

log = logging.getLogger("tokenproxy")

T = TypeVar("T")

_SMALL = 16_384
"""Bytes that are parsed on the event loop: faster than handing them to a thread."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TokenizationError)


@dataclass(slots=True)
class Planner:
    """Plans prompts. One per application."""

    store: Store
    cache: TurnCache
    matcher: Matcher
    pins: Pins
    executor: Executor
    metrics: Metrics
    _parts: BoundedCache[bytes, tuple[bytes, ...]] = field(default_factory=lambda: BoundedCache(1024))

    async def plan(self, request: ChatRequest, model: ServedModel) -> PromptPlan:
        """How the prompt of a request is made.

        On the chat route whatever goes wrong is a reason to render. On the token route, where nothing can be
        rendered instead, it is an error.

        Raises:
            BadRequest: messages to append are refused by the template.
            Unsupported: messages cannot be appended exactly.
        """
        if request.given is not None:
            return await self._plan_given(request, request.given, model)
        try:
            conversation = await self._parse(request.messages)
            scope = self._scope(request, model)
        except _UNREADABLE:
            return Rendered(placement=self._unplaced(request, model), reason=Reason.UNREADABLE)
        match = await self._match(request, conversation, scope)
        placement = self._placement(request, model, scope, conversation, match)
        if request.token_route:
            return Rendered(placement=placement, reason=Reason.NO_IDS)
        if request.special == Reason.IDS_GIVEN:
            return Given(placement=placement, reason=Reason.IDS_GIVEN, prompt=b"", reused=0, appended=0)
        reason = match.reason
        if reason != Reason.FIRST_TURN:
            reason = _must_render(request, conversation, model) or match.reason
        if match.turn is None or reason not in (None, Reason.HISTORY_EDITED, Reason.CALL_REPAIRED):
            return Rendered(placement=placement, reason=reason)
        return await self._extend(placement, match.turn, match, reason, model)

    async def plan_prefix(
        self, request: ChatRequest, prompt: bytes, prefix: int, model: ServedModel
    ) -> PromptPlan:
        """A prompt whose first `prefix` ids the client requires; the rest is the template's rendering.

        Args:
            prompt: the whole prompt as a JSON array.
        """
        placement = await self._place_given(request, prompt, model, appended=False)
        count = ids.check(prompt)
        return Given(
            placement=placement,
            reason=Reason.PREFIX_GIVEN,
            prompt=prompt,
            reused=prefix,
            appended=count - prefix,
        )

    async def release(self, plan: PromptPlan) -> None:
        """Let others continue the turn that a plan claimed: no turn of the plan was recorded."""
        if plan.placement.claimed is not None:
            try:
                await self.store.release(plan.placement.claimed)
            except StoreError as error:
                self.report("a turn that was claimed in vain stays claimed", error)

    def report(self, consequence: str, error: StoreError) -> None:
        """Log and count that the store does not respond."""
        self.metrics.store_errors.inc()
        log.error("%s: %s", consequence, error)

    async def _plan_given(self, request: ChatRequest, given: GivenIds, model: ServedModel) -> PromptPlan:
        prompt = ids.compact(given.raw)
        if request.append is None:
            placement = await self._place_given(request, prompt, model, appended=False)
            return Given(
                placement=placement, reason=Reason.IDS_GIVEN, prompt=prompt, reused=given.count, appended=0
            )
        prompt, appended = await self.append(request, given, model)
        placement = await self._place_given(request, prompt, model, appended=True)
        return Extended(placement=placement, prompt=prompt, reused=given.count, appended=appended)

    async def append(
        self, request: ChatRequest, given: GivenIds, model: ServedModel
    ) -> tuple[bytes, list[int]]:
        """Given ids, and what the template puts after them for the messages to append.

        Returns:
            the prompt as a compact JSON array, and the ids after the given ones.

        Raises:
            BadRequest: the template refuses the messages.
            Unsupported: there is no tokenizer, or no exact append for this template.
        """
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise model.tokenizer_error or Unsupported("appending needs the model's tokenizer")
        kwargs = request.rendering.parse_template_kwargs()
        if reserved := tokenizer.reserved(kwargs):
            raise BadRequest(
                f"`chat_template_kwargs` cannot set {', '.join(reserved)} together with `append_messages`",
                param="chat_template_kwargs",
            )
        new = _objects(request.append or b"[]", "append_messages")
        history = _objects(request.messages, "messages") if request.messages else []
        history = history[: len(history) - len(new)] if request.messages else []
        known = history if history and history[-1].get("role") == "assistant" else None
        raw = ids.compact(given.raw)
        try:
            return await self._in_thread(
                lambda: continue_ids(tokenizer, raw, new, request.rendering, history=known)
            )
        except TemplateUnsupported as error:
            raise Unsupported(
                f"cannot append exactly: {error}", param="append_messages", code="template_unsupported"
            ) from error
        except InvalidIds as error:
            raise BadRequest(f"`{given.field}` {error}", param=given.field) from error
        except TokenizationError as error:
            raise BadRequest(f"`append_messages`: {error}", param="append_messages") from error

    async def _place_given(
        self, request: ChatRequest, prompt: bytes, model: ServedModel, *, appended: bool
    ) -> Placement:
        """Where the turn of a request whose client sent ids is recorded.

        It can be found by its text later if that is proved: its ids are those that the conversation has here.
        """
        whole = bool(request.messages)
        try:
            conversation = await self._parse(request.messages or request.append or b"[]")
            scope = self._scope(request, model)
        except _UNREADABLE:
            return self._unplaced(request, model)  # the engine refuses them
        if not request.record:
            return self._unplaced(request, model)
        match = await self._match(request, conversation, scope) if whole else Match()
        if match.turn is not None and not match.turn.begins(prompt):
            if match.claimed:
                await self.release(Rendered(placement=self._placement(request, model, scope, None, match)))
            match = Match()
        parent, first_new = match.turn if match.same_rollout else None, match.end + 1
        proved = (
            whole and request.findable and await self._proves(conversation, match, prompt, request, model)
        )
        if parent is None and request.session is not None:
            rollout = session_id(request.tenant, request.session.name)
            try:
                parent = await self.matcher.longest_prefix(prompt, rollout)
            except StoreError as error:
                self.report("a turn is recorded without the one before it", error)
            first_new = (conversation.ends[0] + 1 if conversation.ends else 0) if whole and parent else 0
        if request.session is None and match.turn is None and not proved:
            return self._unplaced(request, model)
        placement = self._placement(request, model, scope, conversation, match)
        return replace(placement, parent=parent, first_new=first_new if parent else 0, findable=proved)

    async def _proves(
        self,
        conversation: Conversation,
        match: Match,
        prompt: bytes,
        request: ChatRequest,
        model: ServedModel,
    ) -> bool:
        """Whether a prompt is exactly what this conversation has here: recorded ids, then the template's."""
        tokenizer = model.tokenizer
        if tokenizer is None or conversation.media or not request.findable:
            return False

        def prove() -> bool:
            try:
                if match.turn is not None:
                    expected, _ = continue_turn(
                        tokenizer, match.turn, conversation, match.end, request.rendering
                    )
                else:
                    expected = ids.dump(_render(tokenizer, conversation, request))
            except TokenizationError:
                return False
            return expected == prompt

        if match.turn is None and conversation.holds_assistant:
            return False  # its earlier turns were sampled elsewhere: a rendering proves nothing about them
        return await self._in_thread(prove)

    async def _match(self, request: ChatRequest, conversation: Conversation, scope: Scope) -> Match:
        told = request.session is not None and not request.session.explicit
        rollout = session_id(request.tenant, request.session.name) if request.session else None
        try:
            match = await self.matcher.match(conversation, scope, rollout if told else None)
            used = match.turn.rollout if match.turn is not None and match.same_rollout else rollout
            if used is not None:
                await self.pins.pin(used)
            return match
        except StoreError as error:
            self.report("the prompt of a request is rendered", error)
            return Match(reason=Reason.STORE_UNAVAILABLE)

    async def _extend(
        self,
        placement: Placement,
        turn: CachedTurn,
        match: Match,
        reason: Reason | None,
        model: ServedModel,
    ) -> PromptPlan:
        """Recorded ids, and what the template puts after them; rendered if that is not certain."""
        conversation, tokenizer = placement.conversation, model.tokenizer
        assert conversation is not None and tokenizer is not None
        rendering = placement.scope.rendering
        if not turn.usable:
            return Rendered(placement=placement, reason=Reason.UNUSABLE_TURN)
        if conversation.ends_with_assistant:
            return Rendered(placement=placement, reason=Reason.ENDS_WITH_ASSISTANT)
        if tokenizer.reserved(rendering.parse_template_kwargs()):
            return Rendered(placement=placement, reason=Reason.SPECIAL_REQUEST)
        try:
            prompt, appended = await self._in_thread(
                lambda: continue_turn(tokenizer, turn, conversation, match.end, rendering)
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

    def _unplaced(self, request: ChatRequest, model: ServedModel) -> Placement:
        """No place: the turn is not recorded."""
        scope = Scope(request.tenant, None, request.model or model.name, request.rendering, ())
        return self._placement(request, model, scope, None, Match())

    def _scope(self, request: ChatRequest, model: ServedModel) -> Scope:
        """The scope of a request. Raises one of `_UNREADABLE`."""
        name = request.model or model.name
        fingerprint = model.tokenizer.fingerprint if model.tokenizer else ""
        arguments = (request.rendering, model.printed, name, fingerprint)
        parts = self._parts.get_or_make(raw_key(*arguments), lambda: scope_parts(*arguments))
        session = request.session.name if request.session is not None and request.session.explicit else None
        return Scope(request.tenant, session, name, request.rendering, parts)

    def _placement(
        self,
        request: ChatRequest,
        model: ServedModel,
        scope: Scope,
        conversation: Conversation | None,
        match: Match,
    ) -> Placement:
        now = time.time()
        if request.session is not None:
            rollout, explicit = session_id(request.tenant, request.session.name), request.session.explicit
        elif match.turn is not None and match.same_rollout:
            rollout, explicit = match.turn.rollout, False
        else:
            rollout, explicit = session_id(request.tenant, new_id()), False
        return Placement(
            session=Session(id=rollout, tenant=request.tenant, explicit=explicit, created=now, used=now),
            scope=scope,
            conversation=conversation if request.record else None,
            findable=request.findable,
            candidates=match.candidates,
            claimed=match.turn.id if match.turn is not None and match.claimed else None,
            logprobs_mode=model.logprobs_mode,
            temperature=request.temperature,
            choices=request.choices,
        )

    async def _parse(self, messages: bytes) -> Conversation:
        if len(messages) < _SMALL:
            return self.cache.parse(messages)
        return await self._in_thread(lambda: self.cache.parse(messages))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


def _must_render(request: ChatRequest, conversation: Conversation, model: ServedModel) -> Reason | None:
    """Why the engine must render this request, whatever was recorded."""
    if request.special:
        return Reason(request.special)
    if conversation.media:
        return Reason.MEDIA
    return model.refused or model.no_tokenizer


def _render(tokenizer: ChatTokenizer, conversation: Conversation, request: ChatRequest) -> list[int]:
    return tokenizer.render(
        conversation.parse(0, len(conversation.raws)),
        tools=request.rendering.parse_tools(),
        add_generation_prompt=request.rendering.add_generation_prompt,
        template_kwargs=request.rendering.parse_template_kwargs(),
    )


def _objects(raw: bytes, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects. Raises BadRequest, naming `field`."""
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{field}`: {error}", param=field) from error
