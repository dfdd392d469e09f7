"""`GET /metrics` of the proxy in front: its own counters."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.engine.protocol import Answer, BytesAnswer


class MetricsPage(Dialect):
    """The proxy's own counters; those of the engines are at the engines."""

    path = "/metrics"
    methods = ("GET",)
    inside_vllm = False  # vLLM's own page shows the counters there
    summary = "Counters, for Prometheus"

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """Prometheus' text format."""
        body = generate_latest(gateway.rollouts.metrics.registry)
        return BytesAnswer(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)
