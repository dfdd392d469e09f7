"""`/v1/sessions`: rollouts as trees of turns, their rewards, and the samples they make."""

import math
import time
from abc import abstractmethod
from typing import Any
from urllib.parse import parse_qs

import msgspec

from proxy.errors import BadRequest, EngineUnavailable, NotFound
from proxy.fields import given, parse, read
from proxy.history.store import Session, StoreError
from proxy.history.turn import Turn, new_id, unpack_ids, unpack_logprobs
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.samples.layouts import LAYOUTS
from proxy.samples.samples import samples_of
from proxy.turn.services import Services
from proxy.turn.session_fields import check_name, session_in_path
from proxy.types import Fields

_MOST_LISTED = 1000
_NOT_FOR_SESSIONS = ("messages", "stream", "stream_options")
"""Fields that a session cannot set for its requests: their clients would not understand the answers."""


class _SessionRoute(Route):
    """Routes that need nothing but the store."""

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """See the route's summary."""
        try:
            status, value = await self.reply(incoming, gateway)
        except StoreError as error:
            raise EngineUnavailable(f"the store of rollouts does not answer: {error}") from error
        return BytesResponse(status, list(JSON_HEADERS), msgspec.json.encode(value))

    @property
    def description(self) -> str:
        """See `Route.description`."""
        return type(self).reply.__doc__ or ""

    @abstractmethod
    async def reply(self, incoming: Request, gateway: Services) -> tuple[int, object]:
        """Status and body. Raises StoreError, ApiError."""


class Sessions(_SessionRoute):
    """Make and list sessions."""

    path = "/v1/sessions"
    methods = ("POST", "GET")
    summary = "Make a session, or list those that were used last"

    async def reply(self, incoming: Request, gateway: Services) -> tuple[int, object]:
        """POST: `{"id", "defaults", "overrides", "metadata"}`, all optional. GET: `?limit=&before=`."""
        if incoming.method == "POST":
            return await _save(parse(incoming.body or b"{}"), gateway)
        limit = _number(incoming, "limit", 100)
        if not 1 <= limit <= _MOST_LISTED:
            raise BadRequest(f"`limit` must be between 1 and {_MOST_LISTED}", param="limit")
        before = _number(incoming, "before", math.inf)
        listed = await gateway.rollouts.store.sessions(
            limit=int(limit), before=None if math.isinf(before) else before
        )
        return 200, {"object": "list", "data": [_described(session) for session in listed]}


class OneSession(_SessionRoute):
    """Look at a session's tree, or delete it."""

    path = "/v1/sessions/{session}"
    methods = ("GET", "DELETE")
    summary = "A session with the tree of its turns"

    async def reply(self, incoming: Request, gateway: Services) -> tuple[int, object]:
        """GET: the description, `reward`, and `turns` in their order; `?ids=true` adds ids and logprobs."""
        store, name = gateway.rollouts.store, session_in_path(incoming)
        if incoming.method == "DELETE":
            if not await store.delete(name):
                raise _unknown(name)
            gateway.rollouts.forget(name)
            return 200, {"id": name, "object": "session", "deleted": True}
        session = await _session(name, gateway)
        rewards = await store.rewards(name)
        with_ids = _query(incoming, "ids", "false") == "true"
        turns = await store.turns(name)
        shown = await gateway.in_thread(
            lambda: [_shown(turn, rewards.get(turn.id), with_ids) for turn in turns]
        )
        return 200, {**_described(session), "reward": rewards.get(""), "turns": shown}


class SessionSamples(_SessionRoute):
    """What can be trained on."""

    path = "/v1/sessions/{session}/samples"
    methods = ("GET",)
    summary = "A session's training samples, one for each leaf"

    async def reply(self, incoming: Request, gateway: Services) -> tuple[int, object]:
        """`?shared=once|each`, `?layout=plain|trl|verl|prime-rl|skyrl`: `{"samples", "refused"}`."""
        store, name = gateway.rollouts.store, session_in_path(incoming)
        shared, layout = _query(incoming, "shared", "once"), _query(incoming, "layout", "plain")
        if shared not in ("once", "each"):
            raise BadRequest("`shared` must be `once` or `each`", param="shared")
        if layout not in LAYOUTS:
            raise BadRequest(f"`layout` must be one of {', '.join(LAYOUTS)}", param="layout")
        session = await _session(name, gateway)
        turns, rewards = await store.turns(name), await store.rewards(name)

        def make() -> dict[str, object]:
            made = samples_of(turns, rewards, session=session, shared="each" if shared == "each" else "once")
            rows = [LAYOUTS[layout].row(sample) for sample in made.samples]
            return {"id": name, "samples": rows, "refused": made.refused}

        return 200, await gateway.in_thread(make)


class SessionReward(_SessionRoute):
    """What a rollout was worth."""

    path = "/v1/sessions/{session}/reward"
    summary = "Set the reward of a session, or of one of its turns"

    async def reply(self, incoming: Request, gateway: Services) -> tuple[int, object]:
        """`{"reward": 1.0}` for the whole, beside `"turn": id` for one; `{"rewards": {id: ...}}` for many."""
        name, fields = session_in_path(incoming), parse(incoming.body)
        await _session(name, gateway)
        rewards = read(fields, "rewards", dict[str, float]) or {}
        if (reward := read(fields, "reward", float)) is not None:
            rewards[read(fields, "turn", str) or ""] = reward
        if not rewards:
            raise BadRequest("`reward` is required", param="reward")
        known = {"", *(turn.id for turn in await gateway.rollouts.store.turns(name))}
        if unknown := sorted(rewards.keys() - known):
            raise BadRequest(f"the session has no turn {unknown[0]!r}", param="turn")
        await gateway.rollouts.store.set_rewards(name, rewards)
        return 200, {"id": name, "rewards": await gateway.rollouts.store.rewards(name)}


async def _save(fields: Fields, gateway: Services) -> tuple[int, object]:
    store = gateway.rollouts.store
    name = check_name(read(fields, "id", str) or f"session-{new_id()}", "id")
    before, now = await store.session(name), time.time()
    described: dict[str, Any] = {}
    for field in ("defaults", "overrides", "metadata"):
        value = read(fields, field, Fields)
        if value is None:
            continue
        taken = [] if field == "metadata" else [n for n in _NOT_FOR_SESSIONS if n in value]
        if taken:
            raise BadRequest(f"`{field}` cannot set `{taken[0]}`", param=f"{field}.{taken[0]}")
        described[field] = given(fields, field) or b"{}"
    if before is None:
        saved = Session(id=name, created=now, used=now, **described)
    else:
        saved = msgspec.structs.replace(before, explicit=True, used=now, **described)
    await store.save_session(saved)
    return (201 if before is None else 200), _described(saved)


async def _session(name: str, gateway: Services) -> Session:
    session = await gateway.rollouts.store.session(name)
    if session is None:
        raise _unknown(name)
    return session


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no session {name!r}: it was never used, or made room since",
                    param="session", code="session_not_found")  # fmt: skip


def _described(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "explicit": session.explicit,
        "created": session.created,
        "used": session.used,
        "turn_count": session.turns,
        "bytes": session.size,
        "defaults": msgspec.Raw(session.defaults),
        "overrides": msgspec.Raw(session.overrides),
        "metadata": msgspec.Raw(session.metadata),
    }


def _shown(turn: Turn, reward: float | None, with_ids: bool) -> dict[str, Any]:
    appended = len(turn.appended) // 4
    shown: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "request": turn.request,
        "choice": turn.choice,
        "created": turn.created,
        "model": turn.model,
        "source": turn.source,
        "reason": turn.reason or None,
        "reused": turn.prompt_tokens - appended,
        "appended": appended,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "temperature": turn.temperature,
        "problem": turn.problem or None,
        "reward": reward,
        "messages": msgspec.Raw(turn.messages),
        "message": msgspec.Raw(turn.message),
    }
    if with_ids:
        shown["appended_ids"] = unpack_ids(turn.appended)
        shown["completion_ids"] = unpack_ids(turn.completion)
        shown["logprobs"] = unpack_logprobs(turn.logprobs) if turn.logprobs else None
    return shown


def _query(incoming: Request, name: str, default: str) -> str:
    return parse_qs(incoming.path.partition("?")[2]).get(name, [default])[-1]


def _number(incoming: Request, name: str, default: float) -> float:
    text = _query(incoming, name, str(default))
    try:
        number = float(text)
    except ValueError as error:
        raise BadRequest(f"`{name}` must be a number", param=name) from error
    if math.isnan(number):
        raise BadRequest(f"`{name}` must be a number", param=name)
    return number
