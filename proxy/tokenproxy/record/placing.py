"""Finds where the turn of a request is recorded: its conversation, scope, match and rollout."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from chat_tokenizer import TokenizationError
from chat_tokenizer.cache import BoundedCache
from chat_tokenizer.canonical import NO_DEFAULTS, ArgumentDefaults, argument_defaults
from tokenproxy.base.request import ChatRequest
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.audit import Auditor
from tokenproxy.record.cache import CachedTurn, TurnCache
from tokenproxy.record.claims import Claims
from tokenproxy.record.conversation import Conversation
from tokenproxy.record.encoders import WORTH_A_THREAD_BYTES, EncoderPool
from tokenproxy.record.identity import Scope, raw_key, scope_parts
from tokenproxy.record.images import ImageLoader
from tokenproxy.record.match import Match, Matcher
from tokenproxy.record.plan import Placement, ServedModel
from tokenproxy.record.store import FOUND_AT_MOST, Session, Store, StoreError, session_id
from tokenproxy.record.turn import PromptImage, new_id, request_time
from tokenproxy.record.vocabulary import Reason

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TokenizationError)
"""Raised for messages, tools or template arguments that are not those of a chat completion."""


@dataclass(slots=True)
class Placer:
    """Finds the placement of requests. One per application."""

    store: Store
    cache: TurnCache
    matcher: Matcher
    encoders: EncoderPool
    metrics: Metrics
    auditor: Auditor
    images: ImageLoader
    _read: BoundedCache[bytes, tuple[tuple[bytes, ...], ArgumentDefaults]] = field(
        default_factory=lambda: BoundedCache(1024)
    )

    async def identify(
        self, request: ChatRequest, messages: bytes, model: ServedModel
    ) -> tuple[Conversation, Scope]:
        """The conversation in a JSON array of messages, and its scope on an engine.

        Raises one of `UNREADABLE`, or Overloaded.
        """
        name, rendering = request.model or model.name, request.rendering
        fingerprint = model.tokenizer.fingerprint if model.tokenizer else ""
        arguments = (rendering, model.rendered_fields, name, fingerprint)

        def read() -> tuple[tuple[bytes, ...], ArgumentDefaults]:
            tools = rendering.parse_tools() if b'"default"' in rendering.tools else None
            return scope_parts(*arguments), argument_defaults(tools) if tools else NO_DEFAULTS

        key, size = raw_key(*arguments), rendering.size
        made = self._read.get(key)
        if made is None:
            made = read() if size < WORTH_A_THREAD_BYTES else await self.encoders.run(read, size)
            self._read.put(key, made)
        parts, defaults = made
        session = request.session.name if request.session is not None and request.session.explicit else None
        parse = partial(self.cache.parse, messages, defaults)
        if len(messages) < WORTH_A_THREAD_BYTES:
            conversation = parse()
        else:
            conversation = await self.encoders.run(parse, len(messages))
        return conversation, Scope(request.tenant, session, name, rendering, parts)

    async def match(
        self,
        request: ChatRequest,
        conversation: Conversation,
        scope: Scope,
        claims: Claims,
        may_continue: Callable[[CachedTurn], bool] = lambda turn: True,
    ) -> Match:
        """Find the recorded turn that a request continues, and pin its rollout if the store responds."""
        named, only = _rollouts_of(request)

        async def search() -> Match:
            try:
                match = await self.matcher.match(conversation, scope, only, request.echoed)
                if match.turn is not None and not may_continue(match.turn):
                    return Match()
                return await self.matcher.claim(match, claims)
            except StoreError as error:
                error.report(self.metrics, "the prompt of a request is rendered")
                return Match(reason=Reason.STORE_UNAVAILABLE)

        if named is not None:
            # the turn is of this rollout, if there is one: one wait for the store instead of two
            match, _ = await asyncio.gather(search(), claims.pin(named))
            return match
        match = await search()
        if match.turn is not None and match.same_rollout:
            await claims.pin(match.turn.rollout)
        return match

    async def match_ids(self, request: ChatRequest, prompt: bytes, scope: Scope, claims: Claims) -> Match:
        """Find the recorded turn that a prompt, a compact JSON array of ids, continues.

        In a session, turns that the index does not hold (of the chat routes) are found among the newest;
        ids alone do not continue a prompt with images.

        Raises:
            StoreError: the store does not respond.
        """
        named, only = _rollouts_of(request)
        match = await self.matcher.match_ids(prompt, scope, only)
        if named is not None:
            newest = await self.matcher.longest(await self.store.newest(named, FOUND_AT_MOST), prompt)
            if newest and (match.turn is None or newest[0].count > match.turn.count) and not newest[0].images:
                return Match(newest[0])
        return await self.matcher.claim(match, claims)

    async def longest_in_session(
        self, request: ChatRequest, prompt: bytes, images: Sequence[PromptImage] | None = None
    ) -> list[CachedTurn]:
        """The turns of a request's session with the most ids that a prompt begins with, as `Matcher.longest`.

        There are none without a session, or if the store does not respond.
        """
        if request.session is None:
            return []
        try:
            return await self.matcher.longest_in(
                session_id(request.tenant, request.session.name), prompt, images
            )
        except StoreError as error:
            error.report(self.metrics, "a turn is recorded without the one before it")
            return []

    def place(
        self,
        request: ChatRequest,
        model: ServedModel,
        scope: Scope,
        conversation: Conversation | None,
        match: Match,
    ) -> Placement:
        """Choose a request's rollout: its session, else that of the turn it continues, else a new one."""
        turn = match.turn
        explicit = new = False
        if request.session is not None:
            rollout, explicit = session_id(request.tenant, request.session.name), request.session.explicit
        elif turn is not None and match.same_rollout:
            rollout = turn.rollout
        else:
            rollout, new = session_id(request.tenant, new_id()), True
        return Placement(
            request=request,
            session=Session(
                id=rollout,
                tenant=request.tenant,
                explicit=explicit,
                ambiguous=match.shared is not None or match.reason is Reason.AMBIGUOUS,
                created=time.time(),
            ),
            scope=scope,
            conversation=conversation if request.record else None,
            new_rollout=new,
            findable=request.findable,
            candidates=match.candidates,
            holder=turn.replica if turn is not None else "",
            held_since=request_time(turn.id) if turn is not None else 0.0,
            claimed=turn.id if turn is not None and match.claimed else None,
            logprobs_mode=model.logprobs_mode,
        )

    def nowhere(self, request: ChatRequest, model: ServedModel) -> Placement:
        """The placement of a turn that is not recorded."""
        scope = Scope(request.tenant, None, request.model or model.name, request.rendering, ())
        return self.place(request, model, scope, None, Match())


def _rollouts_of(request: ChatRequest) -> tuple[str | None, str | None]:
    """The rollout of a request's session, and the only one whose turns it continues; None if there is none.

    A session that the client named is part of the scope; a name that the proxy chose is not, and limits the
    search instead.
    """
    if request.session is None:
        return None, None
    rollout = session_id(request.tenant, request.session.name)
    return rollout, None if request.session.explicit else rollout
