"""`GET /health`, `/ready` and `/metrics`: is the process alive, does an engine answer, what was counted."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.services import Services


class Health(Route):
    """Says nothing about engines: a proxy whose engines restart must not be restarted for it."""

    path = "/health"
    methods = ("GET", "HEAD")
    inside_vllm = False  # vLLM's own route also asks its engine core
    needs_tenant = False
    summary = "This process is alive"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """Always 200."""
        return BytesResponse(200, list(JSON_HEADERS), b'{"status":"ok"}')


class Ready(Route):
    """200 when at least one engine takes requests, else 503."""

    path = "/ready"
    methods = ("GET", "HEAD")
    needs_tenant = False
    summary = "An engine answers"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"ready", "engines": [{"engine", "ready", "version", "model", "token_in", "append"}]}`."""
        engines = services.fleet.report()
        ready = any(engine["ready"] for engine in engines)
        body = msgspec.json.encode({"ready": ready, "engines": engines})
        return BytesResponse(200 if ready else 503, list(JSON_HEADERS), body)


class MetricsPage(Route):
    """The proxy's own counters; the engines serve theirs themselves."""

    path = "/metrics"
    methods = ("GET",)
    inside_vllm = False  # vLLM's own page shows the counters there
    needs_tenant = False
    summary = "Counters, for Prometheus"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """Prometheus' text format."""
        body = generate_latest(services.history.metrics.registry)
        return BytesResponse(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)
