"""`GET /metrics` of the proxy in front: its own counters."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.http import BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.services import Services


class MetricsPage(Route):
    """The proxy's own counters; those of the engines are at the engines."""

    path = "/metrics"
    methods = ("GET",)
    inside_vllm = False  # vLLM's own page shows the counters there
    summary = "Counters, for Prometheus"

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """Prometheus' text format."""
        body = generate_latest(gateway.rollouts.metrics.registry)
        return BytesResponse(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)
