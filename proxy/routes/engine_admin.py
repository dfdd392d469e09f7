"""The engine's admin routes, sent to all replicas: weights, caches, sleep, adapters."""

from proxy.dialects.base import header
from proxy.engine.http import normalise_base_url, without_credentials
from proxy.errors import BadRequest
from proxy.fleet.admin_calls import ADMIN_CALLS, AdminCall
from proxy.http import Request, Response
from proxy.routes.base import Route
from proxy.routes.scopes import KeyScope
from proxy.turn.services import Services

REPLICA_HEADER = b"x-replica"


class EngineAdmin(Route):
    """One row of the table in `proxy/fleet/admin_calls.py`."""

    needs_tenant = False
    key_scope = KeyScope.ADMIN
    replaces_engine_route = True

    def __init__(self, call: AdminCall) -> None:
        self._call = call
        self.path = call.path  # type: ignore[misc]
        self.methods = (call.method,)  # type: ignore[misc]
        self.summary = call.summary  # type: ignore[misc]

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's contract. The call reaches all replicas at once, or the one that `X-Replica` names."""
        return await services.admin_calls.run(self._call, request, named_replica(request))


def engine_admin_routes() -> list[EngineAdmin]:
    """One route for each row of the table."""
    return [EngineAdmin(call) for call in ADMIN_CALLS]


def named_replica(request: Request) -> str:
    """Name of the replica that a request is for; empty if it names none.

    Raises:
        BadRequest: the header is not the URL of an engine.
    """
    value = header(request.headers, REPLICA_HEADER)
    if not value:
        return ""
    try:
        return without_credentials(normalise_base_url(value.decode("latin-1")))
    except ValueError as error:
        raise BadRequest(str(error), param="x-replica") from error
