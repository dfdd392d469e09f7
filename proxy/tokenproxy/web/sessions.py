"""`/v1/sessions`: sessions as trees of turns, with their rewards and training samples."""

import math
import time
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import parse, raw_value, read
from tokenproxy.base.http import Request, Response, json_response, query_value
from tokenproxy.base.types import Fields
from tokenproxy.record.store import MAX_DESCRIPTION_BYTES, Cause, Session, session_id
from tokenproxy.record.turn import Turn, new_id, unpack_alternatives, unpack_ids, unpack_logprobs
from tokenproxy.samples.classes import agents_of, classes_of
from tokenproxy.samples.samples import samples_of
from tokenproxy.samples.turn_json import session_fields, traces_of, turn_fields
from tokenproxy.turn.services import Services
from tokenproxy.web.base import StoreRoute
from tokenproxy.web.parameters import (
    next_page,
    number,
    requested_classes,
    requested_layout,
    requested_page,
    requested_shared,
)
from tokenproxy.web.session_names import check_name, session_in_path, unknown_session

_DESCRIPTION = ("defaults", "overrides", "metadata")
_AMBIGUOUS = (
    "another rollout held an equal conversation, so turns of the two may have been confused: name a session "
    "with X-Session-ID or the base URL /sessions/ID/v1"
)
"""The warning in the response to a reward for a session that was ever ambiguous."""
_NOT_FOR_SESSIONS = ("messages", "prompt", "token_ids", "stream", "stream_options")
"""Fields that a session cannot set for its requests: the conversation itself, and those with which a client
would not understand the response."""


class Sessions(StoreRoute):
    """Make and list sessions."""

    path = "/v1/sessions"
    methods = ("POST", "GET")
    summary = "Create a session, or list the most recently used ones"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """POST: `{"id", "defaults", "overrides", "metadata"}`, all optional. GET: `?limit=&before=`."""
        if request.method == "POST":
            return await _save(request, services)
        limit, before = requested_page(request)
        sessions = await services.history.store.sessions(limit=limit, tenant=request.tenant, before=before)
        following = next_page(sessions[-1]) if len(sessions) == limit else None
        listed = [_described(session) for session in sessions]
        return json_response({"object": "list", "data": listed, "next": following})


class OneSession(StoreRoute):
    """Read a session with the tree of its turns, or delete it."""

    path = "/v1/sessions/{session}"
    methods = ("GET", "DELETE")
    summary = "A session with the tree of its turns"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """GET: the description, `reward`, `agents`, and `turns` in order; `?ids=true` adds ids."""
        store, name = services.history.store, session_in_path(request)
        rollout = _rollout(request, name)
        if request.method == "DELETE":
            if not await store.delete(rollout):
                raise unknown_session(name)
            services.history.recorder.forget(rollout)
            services.fleet.conversations.end(rollout)
            return json_response({"id": name, "object": "session", "deleted": True})
        session = await _session(request, name, services)
        rewards = session.rewards
        with_ids = query_value(request, "ids", "false") == "true"
        turns = await store.turns(rollout)

        def show() -> dict[str, Any]:
            classes = classes_of(turns)
            shown = [_shown(turn, classes[turn.id], rewards.get(turn.id), with_ids) for turn in turns]
            return {"agents": agents_of(turns, classes), "turns": shown}

        tree = await services.in_thread(show)
        return json_response({**_described(session), "reward": rewards.get(""), **tree})


class SessionSamples(StoreRoute):
    """Returns the training samples of a session."""

    path = "/v1/sessions/{session}/samples"
    methods = ("GET",)
    summary = "A session's training samples, one for each leaf"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?shared=once|each`, `?layout=plain|trl|verl|prime-rl|skyrl`, `?class=`.

        `{"id", "samples", "refused"}`.
        """
        store, name = services.history.store, session_in_path(request)
        shared, layout = requested_shared(request), requested_layout(request)
        classes = requested_classes(request)
        session, rollout = await _session(request, name, services), _rollout(request, name)
        turns, rewards = await store.turns(rollout), session.rewards

        def export() -> Response:
            result = samples_of(turns, rewards, session=session, shared=shared, wanted=classes)
            rows = [layout.row(sample) for sample in result.samples]
            return json_response({"id": name, "samples": rows, "refused": result.refused})

        return await services.in_thread(export)


class SessionTraces(StoreRoute):
    """Returns the turns of a session as rLLM's trainers read them."""

    path = "/v1/sessions/{session}/traces"
    methods = ("GET",)
    summary = "A session's turns, each with its whole prompt, for rLLM"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?since=&limit=`: a list of rLLM's `TraceRecord`, in the order of the requests."""
        store, name = services.history.store, session_in_path(request)
        since = number("since", query_value(request, "since", "0"))
        limit = number("limit", query_value(request, "limit", "inf"))
        if limit < 1:
            raise BadRequest("`limit` must be at least 1", param="limit")
        await _session(request, name, services)
        turns = await store.turns(_rollout(request, name))

        most = None if math.isinf(limit) else int(limit)
        return json_response(
            await services.in_thread(lambda: traces_of(turns, name, since=since, limit=most))
        )


class SessionReward(StoreRoute):
    """Sets the reward of a session or of its turns."""

    path = "/v1/sessions/{session}/reward"
    summary = "Set the reward of a session, or of one of its turns"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"reward": 1.0}` for the session, with `"turn": ID` for a turn, or `{"rewards": {ID: 1.0}}`."""
        store, name, fields = services.history.store, session_in_path(request), parse(request.body)
        await _session(request, name, services)
        rollout, rewards = _rollout(request, name), _rewards(fields)
        turns = {"", *(turn.id for turn in await store.turns(rollout))}
        if unknown := sorted(rewards.keys() - turns):
            raise BadRequest(f"the session has no turn {unknown[0]!r}", param="turn")
        await store.finish(rollout, Cause.REWARD, rewards)
        session = await _session(request, name, services)
        services.history.feed_watch.notify()
        if "" in rewards:
            services.fleet.conversations.end(rollout)
        stored: dict[str, Any] = {"id": name, "rewards": session.rewards}
        return json_response({**stored, "warning": _AMBIGUOUS} if session.ambiguous else stored)


class SessionEnd(StoreRoute):
    """End a session, after which no request follows; its recorded turns stay."""

    path = "/v1/sessions/{session}/end"
    summary = "End a session: it no longer counts as load, and is finished in /v1/samples"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"id", "object", "ended", "finished"}`. Recorded turns stay.

        `ended` is false if no replica held it. `finished` is false if it has no turns, or is in `/v1/samples`
        already and got no turns since.
        """
        return await _end(session_in_path(request), request, services)


class FinishSession(StoreRoute):
    """Ends a session under the path and parameter of vllm-router."""

    path = "/finish_session"
    inside_vllm = False
    summary = "As /v1/sessions/{session}/end, for clients of vllm-router"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?session_id=ID`; returns the same as `/v1/sessions/ID/end`."""
        name = query_value(request, "session_id", "")
        if not name:
            raise BadRequest("`session_id` is required: /finish_session?session_id=ID", param="session_id")
        return await _end(check_name(name, "session_id"), request, services)


async def _end(name: str, request: Request, services: Services) -> Response:
    rollout = _rollout(request, name)
    # first: it needs no store
    ended = services.fleet.conversations.end(rollout)
    finished = await services.history.store.finish(rollout, Cause.END)
    services.history.feed_watch.notify()
    return json_response({"id": name, "object": "session", "ended": ended, "finished": finished})


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


async def _save(request: Request, services: Services) -> Response:
    """Create a session, or change its description; fields that the request does not hold stay."""
    store, fields = services.history.store, parse(request.body or b"{}")
    field = "id" if raw_value(fields, "id") is not None else "session_id"  # rLLM's name for it
    name = check_name(read(fields, field, str) or f"session-{new_id()}", field)
    before, now = await store.session(_rollout(request, name)), time.time()
    described = _description(fields)
    if before is None:
        session = Session(id=_rollout(request, name), tenant=request.tenant, created=now, **described)
    else:
        session = msgspec.structs.replace(before, **described)
    size = len(session.defaults) + len(session.overrides) + len(session.metadata)
    if described and size > MAX_DESCRIPTION_BYTES:
        largest = max(described, key=lambda field: len(described[field]))
        raise BadRequest(
            f"`{largest}` is too large: defaults, overrides and metadata of a session together may take "
            f"{MAX_DESCRIPTION_BYTES} bytes, these take {size}",
            param=largest,
        )
    await store.add(session)
    saved = await store.session(session.id)
    return json_response(_described(saved or session), 201 if before is None else 200)


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
        raise unknown_session(name)
    return session


def _described(session: Session) -> dict[str, Any]:
    return {
        **session_fields(session),
        "session_id": session.name,
        "object": "session",
        "defaults": msgspec.Raw(session.defaults),
        "overrides": msgspec.Raw(session.overrides),
        "metadata": msgspec.Raw(session.metadata),
    }


def _shown(turn: Turn, request_class: str, reward: float | None, with_ids: bool) -> dict[str, Any]:
    shown = {**turn_fields(turn, request_class), "reward": reward}
    if with_ids:
        shown["appended_ids"] = unpack_ids(turn.appended)
        shown["completion_ids"] = unpack_ids(turn.completion)
        shown["logprobs"] = unpack_logprobs(turn.logprobs) if turn.logprobs else None
        shown["alternatives"] = [
            [{"token": text.decode("utf-8", "replace"), "logprob": logprob} for text, logprob in each]
            for each in unpack_alternatives(turn.alternatives)
        ] or None
    return shown
