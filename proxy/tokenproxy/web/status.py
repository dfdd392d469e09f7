"""Status: whether the process is alive, whether an engine responds, and what was counted."""

from prometheus_client import CONTENT_TYPE_LATEST

from tokenproxy.base.http import BytesResponse, Request, Response, json_response
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route
from tokenproxy.web.keys import KeyScope


class StatusRoute(Route):
    """Base of the routes that tell how this process does: without a tenant, and not observed themselves."""

    methods = ("GET", "HEAD")
    needs_tenant = False
    observed = False


class Root(StatusRoute):
    """Claude Code and other clients request it when they start, to find out whether the base URL responds."""

    path = "/"
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
