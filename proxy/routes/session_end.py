"""Ends a session: no request follows, so it no longer counts as load of the replica that holds it."""

import msgspec

from proxy.errors import BadRequest
from proxy.history.store import session_id
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.routes.session_names import check_name, session_in_path
from proxy.routes.sessions import query_value
from proxy.turn.services import Services


class SessionEnd(Route):
    """End a session; its recorded turns stay."""

    path = "/v1/sessions/{session}/end"
    summary = "End a session: it no longer counts as load"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"id", "object", "ended"}`; `ended` is false if no replica held it. Recorded turns stay."""
        return _end(session_in_path(request), request, services)


class FinishSession(Route):
    """Ends a session under the path and parameter of vllm-router."""

    path = "/finish_session"
    inside_vllm = False
    summary = "As /v1/sessions/{session}/end, for clients of vllm-router"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`?session_id=ID`; returns the same as `/v1/sessions/ID/end`."""
        name = query_value(request, "session_id", "")
        if not name:
            raise BadRequest("`session_id` is required: /finish_session?session_id=ID", param="session_id")
        return _end(check_name(name, "session_id"), request, services)


def _end(name: str, request: Request, services: Services) -> Response:
    ended = services.fleet.conversations.end(session_id(request.tenant, name))
    body = msgspec.json.encode({"id": name, "object": "session", "ended": ended})
    return BytesResponse(200, list(JSON_HEADERS), body)
