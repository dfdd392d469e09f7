"""The routes for operators: the status of the process, which engines it uses, and their admin routes.

These are sent to all replicas.
"""

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import parse, read
from tokenproxy.base.http import BytesResponse, Request, Response, header, json_response, query_value
from tokenproxy.base.urls import normalise_base_url, without_credentials
from tokenproxy.fleet.admin_calls import AdminCall
from tokenproxy.fleet.membership import Membership
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import refused_as


class StatusRoute(Route):
    """Base of the routes that tell how this process does: without a tenant, and not observed themselves."""

    methods = ("GET", "HEAD")
    needs_tenant = False
    observed = False


class Root(StatusRoute):
    """Claude Code and other clients request it when they start, to find out whether the base URL responds."""

    path = "/"
    key_scope: KeyScope | None = KeyScope.TURNS
    summary = "The base URL responds"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """Always 200."""
        return json_response({"status": "ok"})


class Health(Root):
    """Independent of engines: a proxy must not be restarted because its engines restart."""

    path = "/health"
    inside_vllm = False  # vLLM's own route also checks its engine core
    key_scope = None
    summary = "This process is alive"


class Ready(StatusRoute):
    """200 when at least one engine takes requests and the proxy is not stopping, else 503."""

    path = "/ready"
    key_scope = None
    summary = "An engine answers"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"ready", "engines": [{"engine", "ready", "version", "model", "token_in", "append"}], "store"}`.

        The state of the store does not change the status: without the store, prompts are rendered and served.
        If keys are set, only keys with the scope `read` get `engines` and `store`. A proxy that got a signal
        to stop returns `"stopping": true`. While new requests wait for a weight update, `paused` or
        `updating` tells why.
        """
        if request.may_read and services.fleet.weights.outdated:
            await services.fleet.weights.refresh()
        engines, stopping = services.fleet.report(), services.running.stopping
        ready = any(engine["ready"] for engine in engines) and not stopping
        details = {"engines": engines, "store": services.store.health()} if request.may_read else {}
        weights = services.fleet.weights.state
        told: dict[str, object] = {"stopping": True} if stopping else {}
        if request.may_read:
            names = ("paused", "updating")
            told |= {name: value for name in names if (value := getattr(weights, name))}
            told |= {"weight_version": weights.version} if weights.version is not None else {}
        return json_response({"ready": ready, **told, **details}, 200 if ready else 503)


class MetricsPage(StatusRoute):
    """The proxy's own metrics; the engines serve theirs themselves."""

    path = "/metrics"
    inside_vllm = False  # vLLM's own page shows the proxy's metrics
    key_scope = KeyScope.READ
    summary = "Metrics, for Prometheus"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """Prometheus' text format."""
        body = services.history.metrics.page()
        return BytesResponse(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)


class AdminRoute(Route):
    """Base of the routes for administrators, whatever tenant they are."""

    needs_tenant = False
    key_scope = KeyScope.ADMIN


class Replicas(AdminRoute):
    """List, add and remove replicas."""

    path = "/admin/replicas"
    methods: tuple[str, ...] = ("GET", "POST", "DELETE")
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
        self.path = call.path
        self.methods = (call.method,)
        self.summary = call.summary

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
