"""Requests, plans and recorded turns for the tests of history, with nothing of HTTP."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from chat_tokenizer import ids
from tokenproxy.base.request import ChatRequest, Rendering, RetrySigns, SessionRef, Visible
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.cache import TurnCache
from tokenproxy.record.claims import Claims, Pins
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.identity import Scope, scope_parts
from tokenproxy.record.match import Match, Matcher
from tokenproxy.record.new_turns import NewTurn, new_turns
from tokenproxy.record.plan import Extended, Placement, PromptPlan, Rendered
from tokenproxy.record.store import Limits, Session, session_id
from tokenproxy.record.turn import new_id
from tokenproxy.store.sqlite import SqliteStore

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def scope_of(session: str | None = None, tenant: str = "", model: str = "m", **rendering: Any) -> Scope:
    shape = Rendering(**rendering)
    return Scope(tenant, session, model, shape, scope_parts(shape, frozenset(shape.options), model, ""))


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
    messages: list[Message], scope: Scope | None = None, rollout: str | None = None
) -> PromptPlan:
    """A plan by which the engine renders messages."""
    scope = scope or scope_of()
    name = rollout or (session_id(scope.tenant, scope.session) if scope.session else new_id())
    session = Session(id=name, tenant=scope.tenant, explicit=scope.session is not None, created=1.0, used=1.0)
    conversation = TurnCache(2**20).parse(json.dumps(messages).encode())
    return Rendered(
        placement=Placement(
            request=chat_request(messages),
            session=session,
            scope=scope,
            conversation=conversation,
            findable=True,
        )
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
            placement = replace(plan.placement, parent=parent.cached)
            appended = prompt[parent.cached.count :]
            plan = Extended(
                placement=placement, prompt=ids.dump(prompt), reused=parent.cached.count, appended=appended
            )
        choice = SampledChoice(0, message, sampled, [-0.5] * len(sampled), "stop")
        (new,) = new_turns(plan, Completion(ids.dump(prompt), [choice], len(sampled)), None)
        await self.store.add(plan.placement.session, [new.turn], [new.entries])
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
        cache = TurnCache(2**24)
        with ThreadPoolExecutor(1) as executor:
            matcher = Matcher(self.store, cache, executor)
            conversation = cache.parse(json.dumps(messages).encode())
            match = await matcher.match(conversation, scope or scope_of(), rollout, echoed)
            return await matcher.claim(match, claims or Claims(self.pins))


def session_ref(name: str, explicit: bool = True) -> SessionRef:
    return SessionRef(name, explicit)
