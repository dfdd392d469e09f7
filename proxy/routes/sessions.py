"""`/v1/sessions`: sessions as trees of turns, with their rewards and training samples."""

import math
import time
from abc import abstractmethod
from typing import Any
from urllib.parse import parse_qs

import msgspec

from proxy.errors import BadRequest, EngineUnavailable, NotFound
from proxy.fields import parse, raw_value, read
from proxy.history.store import MAX_DESCRIPTION_BYTES, Cursor, Session, StoreError, session_id
from proxy.history.turn import Turn, new_id, unpack_ids, unpack_logprobs
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.routes.scopes import KeyScope
from proxy.routes.session_names import check_name, session_in_path
from proxy.samples.layouts import LAYOUTS
from proxy.samples.samples import samples_of
from proxy.turn.services import Services
from proxy.types import Fields

_DESCRIPTION = ("defaults", "overrides", "metadata")
_MOST_LISTED = 1000
_AMBIGUOUS = (
    "another rollout held an equal conversation, so turns of the two may have been confused: name a session "
    "with X-Session-ID or the base URL /sessions/ID/v1"
)
"""The warning in the response to a reward for a session that was ever ambiguous."""
_NOT_FOR_SESSIONS = ("messages", "stream", "stream_options")
"""Fields that a session cannot set for its requests: their clients would not understand the responses."""


class _SessionRoute(Route):
    """Base of the routes that need the store only, not an engine (except to verify credentials)."""

    # a longer limit, because a session may be large, and these routes cannot respond without the store
    store_seconds = 10.0

    def needed_scope(self, method: str, path: str) -> KeyScope | None:
        """See `Route.needed_scope`: who may sample may also make, reward and delete the sessions of it."""
        return KeyScope.READ if method in ("GET", "HEAD") else KeyScope.INFERENCE

    async def answer(self, request: Request, services: Services, /) -> Response:
        """See the route's summary."""
        try:
            status, value = await self.reply(request, services)
        except StoreError as error:
            raise EngineUnavailable(f"the store does not respond, try again later: {error}") from error
        return BytesResponse(status, list(JSON_HEADERS), msgspec.json.encode(value))

    @property
    def description(self) -> str:
        """See `Route.description`."""
        return type(self).reply.__doc__ or ""

    @abstractmethod
    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """Status and body. Raises StoreError, ApiError."""


class Sessions(_SessionRoute):
    """Make and list sessions."""

    path = "/v1/sessions"
    methods = ("POST", "GET")
    summary = "Create a session, or list the most recently used ones"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """POST: `{"id", "defaults", "overrides", "metadata"}`, all optional. GET: `?limit=&before=`."""
        if request.method == "POST":
            return await _save(request, services)
        limit = _number("limit", query_value(request, "limit", "100"))
        if not 1 <= limit <= _MOST_LISTED:
            raise BadRequest(f"`limit` must be between 1 and {_MOST_LISTED}", param="limit")
        before = _cursor(request, query_value(request, "before", ""))
        sessions = await services.history.store.sessions(
            limit=int(limit), tenant=request.tenant, before=before
        )
        return 200, {
            "object": "list",
            "data": [_described(session) for session in sessions],
            "next": _next_page(sessions, int(limit)),
        }


class OneSession(_SessionRoute):
    """Read a session with the tree of its turns, or delete it."""

    path = "/v1/sessions/{session}"
    methods = ("GET", "DELETE")
    summary = "A session with the tree of its turns"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """GET: the description, `reward`, and `turns` in their order; `?ids=true` adds ids and logprobs."""
        store, name = services.history.store, session_in_path(request)
        rollout = _rollout(request, name)
        if request.method == "DELETE":
            if not await store.delete(rollout):
                raise _unknown(name)
            services.history.recorder.forget(rollout)
            services.fleet.conversations.end(rollout)
            return 200, {"id": name, "object": "session", "deleted": True}
        session = await _session(request, name, services)
        rewards = await store.rewards(rollout)
        with_ids = query_value(request, "ids", "false") == "true"
        turns = await store.turns(rollout)
        shown = await services.in_thread(
            lambda: [_shown(turn, rewards.get(turn.id), with_ids) for turn in turns]
        )
        return 200, {**_described(session), "reward": rewards.get(""), "turns": shown}


class SessionSamples(_SessionRoute):
    """Returns the training samples of a session."""

    path = "/v1/sessions/{session}/samples"
    methods = ("GET",)
    summary = "A session's training samples, one for each leaf"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """`?shared=once|each`, `?layout=plain|trl|verl|prime-rl|skyrl`: `{"samples", "refused"}`."""
        store, name = services.history.store, session_in_path(request)
        shared, layout = query_value(request, "shared", "once"), query_value(request, "layout", "plain")
        if shared not in ("once", "each"):
            raise BadRequest("`shared` must be `once` or `each`", param="shared")
        if layout not in LAYOUTS:
            raise BadRequest(f"`layout` must be one of {', '.join(LAYOUTS)}", param="layout")
        session, rollout = await _session(request, name, services), _rollout(request, name)
        turns, rewards = await store.turns(rollout), await store.rewards(rollout)

        def export() -> dict[str, object]:
            result = samples_of(
                turns, rewards, session=session, shared="each" if shared == "each" else "once"
            )
            rows = [LAYOUTS[layout].row(sample) for sample in result.samples]
            return {"id": name, "samples": rows, "refused": result.refused}

        return 200, await services.in_thread(export)


class SessionReward(_SessionRoute):
    """Sets the reward of a session or of its turns."""

    path = "/v1/sessions/{session}/reward"
    summary = "Set the reward of a session, or of one of its turns"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """`{"reward": 1.0}` for the session, with `"turn": ID` for a turn, or `{"rewards": {ID: 1.0}}`."""
        store, name, fields = services.history.store, session_in_path(request), parse(request.body)
        session = await _session(request, name, services)
        rollout, rewards = _rollout(request, name), _rewards(fields)
        turns = {"", *(turn.id for turn in await store.turns(rollout))}
        if unknown := sorted(rewards.keys() - turns):
            raise BadRequest(f"the session has no turn {unknown[0]!r}", param="turn")
        if not await store.set_rewards(rollout, rewards):
            raise _unknown(name)
        if "" in rewards:
            services.fleet.conversations.end(rollout)
        stored: dict[str, Any] = {"id": name, "rewards": await store.rewards(rollout)}
        return 200, {**stored, "warning": _AMBIGUOUS} if session.ambiguous else stored


def _rewards(fields: Fields) -> dict[str, float]:
    """The rewards of a request: by the id of a turn, or by "" for the session."""
    rewards = read(fields, "rewards", dict[str, float]) or {}
    if not all(map(math.isfinite, rewards.values())):
        raise BadRequest("`rewards` must be finite numbers", param="rewards")
    reward = read(fields, "reward", float)
    if reward is not None:
        if not math.isfinite(reward):
            raise BadRequest("`reward` must be a finite number", param="reward")
        rewards[read(fields, "turn", str) or ""] = reward
    if not rewards:
        raise BadRequest("`reward` is required", param="reward")
    return rewards


async def _save(request: Request, services: Services) -> tuple[int, object]:
    """Create a session, or change its description; fields that the request does not hold stay."""
    store, fields = services.history.store, parse(request.body or b"{}")
    name = check_name(read(fields, "id", str) or f"session-{new_id()}", "id")
    before, now = await store.session(_rollout(request, name)), time.time()
    described = _description(fields)
    if before is None:
        session = Session(
            id=_rollout(request, name), tenant=request.tenant, created=now, used=now, **described
        )
    else:
        session = msgspec.structs.replace(before, used=now, **described)
    size = len(session.defaults) + len(session.overrides) + len(session.metadata)
    if described and size > MAX_DESCRIPTION_BYTES:
        largest = max(described, key=lambda field: len(described[field]))
        raise BadRequest(
            f"`{largest}` is too large: defaults, overrides and metadata of a session together may take "
            f"{MAX_DESCRIPTION_BYTES} bytes, these take {size}",
            param=largest,
        )
    await store.save_session(session)
    # the most recently used one, even if the clock was set back
    await store.pin(session.id, 0.0)
    saved = await store.session(session.id)
    return (201 if before is None else 200), _described(saved or session)


def _description(fields: Fields) -> dict[str, Any]:
    """The fields of a request that describe a session, as JSON."""
    described: dict[str, Any] = {}
    for field in _DESCRIPTION:
        value = read(fields, field, dict[str, Any])
        if value is None:
            continue
        refused = [] if field == "metadata" else [name for name in _NOT_FOR_SESSIONS if name in value]
        if refused:
            raise BadRequest(f"`{field}` cannot set `{refused[0]}`", param=f"{field}.{refused[0]}")
        described[field] = raw_value(fields, field) or b"{}"
    return described


def _rollout(request: Request, name: str) -> str:
    """The id under which the store holds a session of the caller's."""
    return session_id(request.tenant, name)


async def _session(request: Request, name: str, services: Services) -> Session:
    session = await services.history.store.session(_rollout(request, name))
    if session is None:
        raise _unknown(name)
    return session


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"unknown session {name!r}: never used, deleted, or evicted",
        param="session",
        code="session_not_found",
    )


def _described(session: Session) -> dict[str, Any]:
    return {
        "id": session.name,
        "object": "session",
        "explicit": session.explicit,
        "ambiguous": session.ambiguous,
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


def query_value(request: Request, name: str, default: str) -> str:
    return parse_qs(request.path.partition("?")[2]).get(name, [default])[-1]


def _cursor(request: Request, text: str) -> Cursor | None:
    """A position in the list: `USED:ID` from the field `next`, or a time alone. None is the beginning."""
    used, _, last = text.partition(":")
    seconds = _number("before", used or "inf")
    return None if math.isinf(seconds) else Cursor(seconds, session_id(request.tenant, last) if last else "")


def _next_page(sessions: list[Session], limit: int) -> str | None:
    """The `before` of the next page, or None where there is none."""
    if len(sessions) < limit:
        return None
    return f"{sessions[-1].used!r}:{sessions[-1].name}"


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise BadRequest(f"`{name}` must be a number", param=name) from error
    if math.isnan(number):
        raise BadRequest(f"`{name}` must be a number", param=name)
    return number
