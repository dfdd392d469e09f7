"""`GET /health`: this process is alive."""

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.engine.protocol import JSON_HEADERS, Answer, BytesAnswer


class Health(Dialect):
    """Says nothing about engines: a proxy whose engines restart must not be restarted for it."""

    path = "/health"
    methods = ("GET", "HEAD")
    inside_vllm = False  # vLLM's own route also asks its engine core
    summary = "This process is alive"

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """Always 200."""
        return BytesAnswer(200, list(JSON_HEADERS), b'{"status":"ok"}')
