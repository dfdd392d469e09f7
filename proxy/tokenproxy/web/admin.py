"""The admin routes: which engines the proxy uses, and those of the engines, sent to all replicas."""

from collections.abc import Awaitable, Callable
from typing import ClassVar

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import parse, read
from tokenproxy.base.http import Request, Response, header, json_response, query_value
from tokenproxy.base.urls import normalise_base_url, without_credentials
from tokenproxy.fleet.admin_calls import AdminCall
from tokenproxy.fleet.membership import Membership
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import refused_as


class AdminRoute(Route):
    """Base of the routes for administrators, whatever tenant they are."""

    needs_tenant = False
    key_scope = KeyScope.ADMIN


class Replicas(AdminRoute):
    """List, add and remove replicas."""

    path = "/admin/replicas"
    methods: ClassVar[tuple[str, ...]] = ("GET", "POST", "DELETE")
    inside_vllm = False
    summary = "The replicas: list, add, remove"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """GET lists them as `/ready` does. POST `{"url"}` adds one; DELETE `?url=` removes one.

        Requests that run on a removed replica end normally, and others notice nothing. All processes of the
        fleet that share the store apply a change; if the store does not take it, nothing changes (503).
        """
        membership = services.membership
        assert membership is not None  # these routes are not mounted inside vLLM
        if request.method != "GET":
            posted = request.method == "POST"
            url = read(parse(request.body), "url", str) if posted else query_value(request, "url", "")
            if posted and not url:
                raise BadRequest.of("url", 'is required: {"url": "http://10.0.0.11:8000"}')
            with refused_as("url"):
                if not await self.change(membership, request.method)(url or ""):
                    raise NotFound(f"no replica at {url}: GET /admin/replicas lists them", param="url")
        return json_response({"replicas": services.fleet.report(), "changes": membership.changes})

    def change(self, membership: Membership, method: str) -> Callable[[str], Awaitable[bool]]:
        """What changes a replica by its URL; False if there is none. Raises ValueError for a wrong URL."""
        return membership.remove if method == "DELETE" else membership.add


class Drain(Replicas):
    """Let a replica finish what it does, and send it nothing more."""

    path = "/admin/replicas/drain"
    methods = ("POST",)
    summary = "Drain a replica: it gets no more requests"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"url"}`; `requests` in the answer tells how many still run. Adding it again ends the draining."""
        return await super().answer(request, services)

    def change(self, membership: Membership, method: str) -> Callable[[str], Awaitable[bool]]:
        """See `Replicas.change`."""
        return membership.drain


class Flush(AdminRoute):
    """Waits for the record of turns, for rLLM."""

    path = "/admin/flush"
    summary = "Wait until the turns of streams that clients left are recorded"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"status": "flushed"}`. A turn that ended is recorded before its response ends."""
        await services.history.tasks.settle()
        return json_response({"status": "flushed"})


class EngineAdmin(AdminRoute):
    """One row of the table in `proxy/tokenproxy/fleet/admin_calls.py`."""

    replaces_engine_route = True

    def __init__(self, call: AdminCall) -> None:
        self._call = call
        self.path = call.path  # type: ignore[misc]
        self.methods = (call.method,)  # type: ignore[misc]
        self.summary = call.summary  # type: ignore[misc]

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The engine's contract. The call reaches all replicas at once, or the one that `X-Replica` names."""
        return await services.admin_calls.run(self._call, request, named_replica(request))


def named_replica(request: Request) -> str:
    """Name of the replica that a request is for; empty if it names none.

    Raises:
        BadRequest: the header is not the URL of an engine.
    """
    value = header(request.headers, b"x-replica")
    if not value:
        return ""
    with refused_as("x-replica"):
        return without_credentials(normalise_base_url(value.decode("latin-1")))
