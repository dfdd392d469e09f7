"""Finds where the turn of a request is recorded: its conversation, scope, match and rollout."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from proxy.history.audit import Auditor
from proxy.history.cache import TurnCache
from proxy.history.cached_turn import CachedTurn
from proxy.history.claims import Claims
from proxy.history.conversation import Conversation
from proxy.history.encoders import WORTH_A_THREAD_BYTES, EncoderPool
from proxy.history.ids_index import match_ids
from proxy.history.images import ImageLoader
from proxy.history.matcher import Match, Matcher
from proxy.history.origin import origin_of
from proxy.history.plan import Placement, ServedModel
from proxy.history.prompt_image import PromptImage
from proxy.history.scope import Scope, raw_key, scope_parts
from proxy.history.store import FOUND_AT_MOST, Session, Store, StoreError, session_id
from proxy.history.turn import new_id, request_time
from proxy.history.vocabulary import Reason
from proxy.metrics import Metrics
from proxy.turn.request import ChatRequest, Rendering
from tokenization import TokenizationError
from tokenization.cache import BoundedCache
from tokenization.canonical import NO_DEFAULTS, ArgumentDefaults, argument_defaults

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
    _defaults: BoundedCache[bytes, ArgumentDefaults] = field(default_factory=lambda: BoundedCache(1024))
    _parts: BoundedCache[bytes, tuple[bytes, ...]] = field(default_factory=lambda: BoundedCache(1024))

    async def parse(self, request: ChatRequest, messages: bytes) -> Conversation:
        """The conversation of a request whose messages are a JSON array.

        Raises one of `UNREADABLE`, or Overloaded.
        """
        defaults = self._defaults_of(request.rendering)
        if len(messages) < WORTH_A_THREAD_BYTES:
            return self.cache.parse(messages, defaults)
        parse = partial(self.cache.parse, messages, defaults)
        return await self.encoders.run(parse, len(messages), tenant=request.tenant)

    def _defaults_of(self, rendering: Rendering) -> ArgumentDefaults:
        """What the tools declare as defaults of their arguments. Raises one of `UNREADABLE`."""
        if b'"default"' not in rendering.tools:
            return NO_DEFAULTS
        key = hashlib.blake2b(rendering.tools, digest_size=16).digest()
        return self._defaults.get_or_make(key, lambda: argument_defaults(rendering.parse_tools() or ()))

    def scope(self, request: ChatRequest, model: ServedModel) -> Scope:
        """The scope of a request on an engine. Raises one of `UNREADABLE`."""
        name = request.model or model.name
        fingerprint = model.tokenizer.fingerprint if model.tokenizer else ""
        arguments = (request.rendering, model.rendered_fields, name, fingerprint)
        parts = self._parts.get_or_make(raw_key(*arguments), lambda: scope_parts(*arguments))
        session = request.session.name if request.session is not None and request.session.explicit else None
        return Scope(request.tenant, session, name, request.rendering, parts)

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
        match = await match_ids(self.matcher, prompt, scope, only)
        if named is not None:
            newest = await self.matcher.longest_of(await self.store.newest(named, FOUND_AT_MOST), prompt)
            longer = newest is not None and (match.turn is None or newest.count > match.turn.count)
            if newest is not None and longer and not newest.images:
                return Match(newest)
        return await self.matcher.claim(match, claims)

    async def longest_prefix(
        self, prompt: bytes, rollout: str, images: Sequence[PromptImage] | None = None
    ) -> CachedTurn | None:
        """See `Matcher.longest_prefix`; None too if the store does not respond. Raises AmbiguousImages."""
        try:
            return await self.matcher.longest_prefix(prompt, rollout, images)
        except StoreError as error:
            error.report(self.metrics, "a turn is recorded without the one before it")
            return None

    def place(
        self,
        request: ChatRequest,
        model: ServedModel,
        scope: Scope,
        conversation: Conversation | None,
        match: Match,
    ) -> Placement:
        """Choose a request's rollout: its session, else that of the turn it continues, else a new one."""
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
            new_rollout=request.session is None and (match.turn is None or not match.same_rollout),
            findable=request.findable,
            candidates=match.candidates,
            holder=match.turn.replica if match.turn is not None else "",
            held_since=request_time(match.turn.id) if match.turn is not None else 0.0,
            claimed=match.turn.id if match.turn is not None and match.claimed else None,
            logprobs_mode=model.logprobs_mode,
            temperature=request.temperature,
            choices=request.choices,
            media=request.prompt_media,
            origin=origin_of(request.headers),
            requested_model=request.requested_model,
            routed_experts_start=request.routed_experts_start,
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
