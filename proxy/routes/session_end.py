"""Ends a session: no request follows.

It no longer counts as load of the replica that holds it, and its samples are in the feed.
"""

from proxy.errors import BadRequest
from proxy.history.store import Cause, session_id
from proxy.http import Request, query_value
from proxy.routes.session_names import check_name, session_in_path
from proxy.routes.store_route import StoreRoute
from proxy.turn.services import Services


class SessionEnd(StoreRoute):
    """End a session; its recorded turns stay."""

    path = "/v1/sessions/{session}/end"
    summary = "End a session: it no longer counts as load, and is finished in /v1/samples"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """`{"id", "object", "ended", "finished"}`. Recorded turns stay.

        `ended` is false if no replica held it. `finished` is false if it has no turns, or is in `/v1/samples`
        already and got no turns since.
        """
        return 200, await _end(session_in_path(request), request, services)


class FinishSession(StoreRoute):
    """Ends a session under the path and parameter of vllm-router."""

    path = "/finish_session"
    inside_vllm = False
    summary = "As /v1/sessions/{session}/end, for clients of vllm-router"

    async def reply(self, request: Request, services: Services) -> tuple[int, object]:
        """`?session_id=ID`; returns the same as `/v1/sessions/ID/end`."""
        name = query_value(request, "session_id", "")
        if not name:
            raise BadRequest("`session_id` is required: /finish_session?session_id=ID", param="session_id")
        return 200, await _end(check_name(name, "session_id"), request, services)


async def _end(name: str, request: Request, services: Services) -> dict[str, object]:
    rollout = session_id(request.tenant, name)
    # first: it needs no store
    ended = services.fleet.conversations.end(rollout)
    finished = await services.history.store.finish(rollout, Cause.END)
    services.history.feed_watch.notify()
    return {"id": name, "object": "session", "ended": ended, "finished": finished}
