"""`/v1/sessions`: sessions as trees of turns, with their rewards and training samples."""

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest, Conflict
from tokenproxy.base.fields import NULL, decode, join, parse, raw_value, read
from tokenproxy.base.http import Request, Response, json_response, query_value
from tokenproxy.base.types import Fields
from tokenproxy.record.session_keys import DEFAULT_S, LONGEST_S
from tokenproxy.record.session_rules import SessionRules, read_refusals
from tokenproxy.record.store import DESCRIPTION, MAX_DESCRIPTION_BYTES, Session, Store, session_id
from tokenproxy.record.turn import Turn, new_id, unpack_alternatives, unpack_ids, unpack_logprobs
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples.samples import samples_of
from tokenproxy.samples.turn_json import session_fields, shown_turns, stored_json, traces_of
from tokenproxy.turn.services import Services
from tokenproxy.viewer.recording import RecordedSession
from tokenproxy.web.base import SessionRoute, StoreRoute
from tokenproxy.web.parameters import Query, check_name, next_page, session_in_path, unknown_session

MOST_TURNS = 1_000_000
"""Of a session that are returned at once."""
_rules = msgspec.json.Decoder(SessionRules)
_AMBIGUOUS = (
    "another rollout held an equal conversation, so turns of the two may have been confused: name a session "
    "with X-Session-ID or the base URL /sessions/ID/v1"
)
"""The warning in the response to a reward for a session that was ever ambiguous."""
_CREATING, _CREATES_S = "creating", 30.0
"""Space of the sessions that a request creates which must not exist, and seconds after which such a claim
expires if its process died."""
_NOT_FOR_SESSIONS = ("messages", "prompt", "token_ids", "stream", "stream_options")
"""Fields that a session cannot set for its requests: the conversation itself, and those with which a client
would not understand the response."""


class Sessions(StoreRoute):
    """Make and list sessions."""

    path = "/v1/sessions"
    methods = ("POST", "GET")
    summary = "Create a session, or list the most recently used ones"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """POST: see `_save`. GET: `?limit=&before=`."""
        if request.method == "POST":
            return await _save(request, services)
        limit, before = Query(request, ("limit", "before")).page()
        sessions = await services.store.sessions(limit=limit, tenant=request.tenant, before=before)
        following = next_page(sessions[-1]) if len(sessions) == limit else None
        listed = [_described(session) for session in sessions]
        return json_response({"object": "list", "data": listed, "next": following})


class OneSession(SessionRoute):
    """Read a session with the tree of its turns, or delete it."""

    path = "/v1/sessions/{session}"
    methods = ("GET", "DELETE")
    parameters = ("ids", "limit", "after")
    summary = "A session with the tree of its turns"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """DELETE removes it with its turns; for GET see `show`."""
        if request.method == "GET":
            return await super().answer(request, services)
        name = session_in_path(request)
        rollout = session_id(request.tenant, name)
        await services.end_keys(rollout)
        if not await services.store.delete(rollout):
            raise unknown_session(name)
        services.history.forget(rollout)
        services.fleet.conversations.end(rollout)
        return json_response({"id": name, "object": "session", "deleted": True})

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """GET: the description, `reward`, `refusals`, `agents`, and `turns` in order.

        `?ids=true` adds ids. `?limit=&after=`: that many turns after the turn `after`; `next` is the last of
        them while more follow. A slow reader holds no more of a large session than one such page.
        """
        ids, rewards = query.flag("ids"), found.rewards
        page = _page(query, found.turns)

        def tree() -> dict[str, Any]:
            shown = shown_turns(found.turns, page, lambda turn: _evidence(turn, rewards.get(turn.id), ids))
            more = page and page[-1] is not found.turns[-1]
            return {**shown, "next": page[-1].id if more else None}

        refusals = await read_refusals(services.store, found.session.id)
        session = {**_described(found.session), "reward": rewards.get(""), **msgspec.structs.asdict(refusals)}
        return json_response({**session, **await services.encoders.run(tree)})


class SessionSamples(SessionRoute):
    """Returns the training samples of a session."""

    path = "/v1/sessions/{session}/samples"
    parameters = ("shared", "layout", "class", "on_policy")
    summary = "A session's training samples, one for each leaf"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """`?shared=once|each`, `?layout=`, `?class=`, `?on_policy=true`.

        `{"id", "samples", "refused"}`.
        """
        layout, session, selection = query.layout(), found.session, query.selection()

        def export() -> Response:
            result = samples_of(found.turns, found.rewards, session=session, selection=selection)
            rows = [layout.row(sample) for sample in result.samples]
            return json_response({"id": session.name, "samples": rows, "refused": result.refused})

        return await services.encoders.run(export)


class SessionTraces(SessionRoute):
    """Returns the turns of a session as rLLM's trainers read them."""

    path = "/v1/sessions/{session}/traces"
    parameters = ("since", "limit")
    summary = "A session's turns, each with its whole prompt, for rLLM"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """`?since=&limit=`: a list of rLLM's `TraceRecord`, in the order of the requests."""
        since, most = query.number("since", "0"), query.limit(MOST_TURNS, MOST_TURNS)
        return json_response(
            await services.encoders.run(
                lambda: traces_of(found.turns, found.session.name, since=since, limit=most)
            )
        )


class SessionReward(SessionRoute):
    """Sets the reward of a session or of its turns."""

    path = "/v1/sessions/{session}/reward"
    methods = ("POST",)
    summary = "Set the reward of a session, or of one of its turns"

    async def show(self, query: Query, services: Services, found: RecordedSession) -> Response:
        """`{"reward": 1.0}` for the session, with `"turn": ID` for a turn, or `{"rewards": {ID: 1.0}}`."""
        store, session, rewards = services.store, found.session, _rewards(parse(query.request.body))
        if unknown := sorted(rewards.keys() - {"", *(turn.id for turn in found.turns)}):
            raise BadRequest(f"the session has no turn {unknown[0]!r}", param="turn")
        if "" in rewards:
            await services.end_keys(session.id)
        await store.finish(session.id, Cause.REWARD, rewards)
        rewarded = await store.session(session.id)
        if rewarded is None:
            raise unknown_session(session.name)
        services.history.feed_watch.notify()
        if "" in rewards:
            services.fleet.conversations.end(session.id)
        stored: dict[str, Any] = {"id": session.name, "rewards": rewarded.rewards}
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
        name = self.name(request)
        rollout = session_id(request.tenant, name)
        # first: it needs no store
        ended = services.fleet.conversations.end(rollout)
        await services.end_keys(rollout)
        finished = await services.store.finish(rollout, Cause.END)
        services.history.feed_watch.notify()
        return json_response({"id": name, "object": "session", "ended": ended, "finished": finished})

    def name(self, request: Request) -> str:
        """The session that a request names. Raises BadRequest."""
        return session_in_path(request)


class FinishSession(SessionEnd):
    """Ends a session under the path and parameter of vllm-router."""

    path = "/finish_session"
    summary = "As /v1/sessions/{session}/end, for clients of vllm-router"

    def name(self, request: Request) -> str:
        """The value of `?session_id=`. Raises BadRequest."""
        name = query_value(request, "session_id", "")
        if not name:
            raise BadRequest.of("session_id", "is required: /finish_session?session_id=ID")
        return check_name(name, "session_id")


def _rewards(fields: Fields) -> dict[str, float]:
    """The rewards of a request: by the id of a turn, or by "" for the session."""
    rewards = read(fields, "rewards", dict[str, float]) or {}
    if not all(map(math.isfinite, rewards.values())):
        raise BadRequest.of("rewards", "must be finite numbers")
    reward = read(fields, "reward", float)
    if reward is not None:
        if not math.isfinite(reward):
            raise BadRequest.of("reward", "must be a finite number")
        rewards[read(fields, "turn", str) or ""] = reward
    if not rewards:
        raise BadRequest.of("reward", "is required")
    return rewards


async def _save(request: Request, services: Services) -> Response:
    """Create a session, or change its description; fields that the request does not hold stay.

    `id`, `defaults`, `overrides`, `metadata`, `limits`, `policy`; `echo` is kept as the override
    `echo_policy`. Where the proxy has keys, `key` of the response takes turns of this session and nothing
    else, for `key_expires_s` seconds. `exists`: see `_created_once`.
    """
    fields = parse(request.body or b"{}")
    field = "id" if raw_value(fields, "id") is not None else "session_id"  # rLLM's name for it
    name = check_name(read(fields, field, str) or f"session-{new_id()}", field)
    session = Session(id=session_id(request.tenant, name), tenant=request.tenant, created=time.time())
    exists = read(fields, "exists", str)
    if exists not in (None, "continue", "error"):
        raise BadRequest.of("exists", "must be `continue` or `error`")
    asked_s = read(fields, "key_expires_s", float)
    expires_s = DEFAULT_S if asked_s is None else asked_s
    if not 0 < expires_s <= LONGEST_S:
        raise BadRequest.of("key_expires_s", f"must be more than 0 and at most {LONGEST_S}")
    async with _created_once(services.store, session, field) if exists == "error" else nullcontext():
        shown, status = await _describe(services.store, session, fields)
    if services.session_keys is not None:
        shown["key"] = await services.session_keys.issue(request.tenant, name, expires_s)
    return json_response(shown, status)


@asynccontextmanager
async def _created_once(store: Store, session: Session, field: str) -> AsyncIterator[None]:
    """Hold the claim to create a session: of several requests with `exists: error`, one gets it.

    Raises:
        Conflict: the session exists, or another request creates it.
    """
    claim = new_id().encode()
    claimed = await store.put(_CREATING, session.id, claim, keep_s=_CREATES_S, before=None)
    try:
        # read after the claim: a session that its last holder created is seen
        if not claimed or await store.session(session.id) is not None:
            message = f"the session {session.name!r} exists: choose a name that was not used, such as a UUID"
            raise Conflict(message, param=field, code="session_exists")
        yield
    finally:
        if claimed:
            await store.put(_CREATING, session.id, None, before=claim)


async def _describe(store: Store, session: Session, fields: Fields) -> tuple[dict[str, Any], int]:
    """Save the fields of a request that describe a session; create it if the store does not hold it.

    Returns what the client gets, and the status.
    """
    described = _description(fields)
    before = await store.session(session.id)
    if (echo := raw_value(fields, "echo")) is not None:
        overrides = described.get("overrides", before.overrides if before else b"{}")
        described["overrides"] = join({**parse(overrides), "echo_policy": msgspec.Raw(echo)})
    session = msgspec.structs.replace(before or session, **described)
    size = session.description_bytes
    if described and size > MAX_DESCRIPTION_BYTES:
        largest = max(described, key=lambda field: len(described[field]))
        raise BadRequest.of(
            largest,
            f"is too large: {', '.join(DESCRIPTION)} of a session together may take "
            f"{MAX_DESCRIPTION_BYTES} bytes, these take {size}",
        )
    await store.add(session, fields=described)
    saved = await store.session(session.id)
    return _described(saved or session), 201 if before is None else 200


def _description(fields: Fields) -> dict[str, Any]:
    """The fields of a request that describe a session, as JSON. Raises BadRequest."""
    described: dict[str, Any] = {}
    if raw_value(fields, "sampling_params") is not None:  # rLLM's name for the defaults
        if raw_value(fields, "defaults") is not None:
            raise BadRequest.of("sampling_params", "and `defaults` are the same")
        fields = {**fields, "defaults": fields["sampling_params"]}
    for field in DESCRIPTION:
        value = read(fields, field, dict[str, Any])
        if value is None:
            continue
        described[field] = raw_value(fields, field) or b"{}"
        refused = [name for name in _NOT_FOR_SESSIONS if name in value]
        if refused and field in ("defaults", "overrides"):
            raise BadRequest(f"`{field}` cannot set `{refused[0]}`", param=f"{field}.{refused[0]}")
    rules = {name: msgspec.Raw(raw_value(fields, name) or NULL) for name in SessionRules.__struct_fields__}
    decode(join(rules), _rules)
    return described


def _described(session: Session) -> dict[str, Any]:
    return {
        **session_fields(session),
        "session_id": session.name,
        "object": "session",
        **{name: stored_json(getattr(session, name), b"{}") for name in DESCRIPTION},
    }


def _page(query: Query, turns: Sequence[Turn]) -> Sequence[Turn]:
    """The turns that `?limit=&after=` selects."""
    limit, after = query.limit(MOST_TURNS, MOST_TURNS), query.text("after")
    before = [index for index, turn in enumerate(turns) if turn.id == after]
    if after and not before:
        raise BadRequest.of("after", f"must be a turn of the session, such as `next`, not {after!r}")
    rest = turns[before[0] + 1 :] if before else turns
    return rest[:limit]


def _evidence(turn: Turn, reward: float | None, with_ids: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"reward": reward}
    if with_ids:
        shown["appended_ids"] = unpack_ids(turn.appended)
        shown["completion_ids"] = unpack_ids(turn.completion)
        shown["logprobs"] = unpack_logprobs(turn.logprobs) if turn.logprobs else None
        shown["alternatives"] = [
            [{"token": text.decode("utf-8", "replace"), "logprob": logprob} for text, logprob in each]
            for each in unpack_alternatives(turn.alternatives)
        ] or None
        shown["weight_versions"] = turn.weight_versions
        shown["weights_uncertain"] = turn.weights_uncertain
        shown["segments"] = turn.segments
    return shown
