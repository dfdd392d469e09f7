"""Requests, plans and recorded turns for the tests of history, with nothing of HTTP."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from chat_tokenizer import ids
from tokenproxy.base.request import ChatRequest, Rendering, RetrySigns, SessionRef, Visible
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.claims import Claims, Pins
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.identity import Scope, scope_parts
from tokenproxy.record.match import Match, Matcher
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.recorder import NewTurn, new_turns
from tokenproxy.record.store import Limits, Session, session_id
from tokenproxy.record.turn import IndexedTurn, new_id
from tokenproxy.record.vocabulary import Source
from tokenproxy.store.sqlite import SqliteStore

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def scope_of(session: str | None = None, tenant: str = "", model: str = "m", **rendering: Any) -> Scope:
    shape = Rendering(**rendering)
    return Scope(tenant, session, model, scope_parts(shape, frozenset(shape.options), model, ""))


def chat_request(messages: list[Message] | None = None, **fields: Any) -> ChatRequest:
    """A request of the chat route."""
    made: dict[str, Any] = {
        "fields": {},
        "headers": [],
        "messages": json.dumps(messages or [user("Hi")]).encode(),
        "rendering": Rendering(),
        "model": "m",
        "tenant": "",
        "session": None,
        "visible": Visible(False, False),
        "retry": RetrySigns(),
    }
    return ChatRequest(**{**made, **fields})


def rendered_plan(
    messages: list[Message], scope: Scope | None = None, rollout: str | None = None, **request: Any
) -> PromptPlan:
    """A plan by which the engine renders messages."""
    scope = scope or scope_of()
    name = rollout or (session_id(scope.tenant, scope.session) if scope.session else new_id())
    session = Session(id=name, tenant=scope.tenant, explicit=scope.session is not None, created=1.0, used=1.0)
    cache = TurnCache(2**20)
    conversation = cache.parse(cache.recall(json.dumps(messages).encode()))
    return PromptPlan(
        request=chat_request(messages, **request),
        session=session,
        scope=scope,
        conversation=conversation,
        findable=True,
    )


class Record:
    """A store with what was sampled, and a matcher with an empty cache."""

    def __init__(self) -> None:
        self.store = SqliteStore(None, Limits())
        self.pins = Pins(self.store, Metrics())

    async def add(
        self,
        messages: list[Message],
        message: Message,
        prompt: list[int],
        sampled: list[int],
        scope: Scope | None = None,
        rollout: str | None = None,
        parent: NewTurn | None = None,
    ) -> NewTurn:
        """Record a turn."""
        plan = rendered_plan(messages, scope, rollout)
        if parent is not None and parent.cached is not None:
            plan = replace(plan, source=Source.EXTENDED, parent=parent.cached, prompt=ids.dump(prompt))
        choice = SampledChoice(0, message, sampled, [-0.5] * len(sampled), "stop")
        (new,) = new_turns(plan, Completion(ids.dump(prompt), [choice], len(sampled)), None)
        await self.store.add(plan.session, [IndexedTurn(new.turn, new.entries)])
        return new

    async def match(
        self,
        messages: list[Message],
        scope: Scope | None = None,
        rollout: str | None = None,
        echoed: Mapping[int, str] | None = None,
        claims: Claims | None = None,
    ) -> Match:
        """The turn that a request continues, and which it claims for ever without `claims`."""
        session = session_ref(rollout, explicit=False) if rollout else None
        request = chat_request(messages, session=session, echoed=echoed or {})
        async with self.matcher() as matcher:
            conversation = matcher.cache.parse(matcher.cache.recall(request.messages))
            claims = claims or Claims(self.pins)
            return await matcher.match(request, conversation, scope or scope_of(), claims)

    @asynccontextmanager
    async def matcher(self) -> AsyncIterator[Matcher]:
        """A matcher with an empty cache."""
        encoders = EncoderPool(1)
        try:
            yield Matcher(self.store, TurnCache(2**24), encoders, Metrics())
        finally:
            encoders.shutdown()


def session_ref(name: str, explicit: bool = True) -> SessionRef:
    return SessionRef(name, explicit)
