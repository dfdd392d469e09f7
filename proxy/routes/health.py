"""`GET /health`: this process is alive."""

from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.services import Services


class Health(Route):
    """Says nothing about engines: a proxy whose engines restart must not be restarted for it."""

    path = "/health"
    methods = ("GET", "HEAD")
    inside_vllm = False  # vLLM's own route also asks its engine core
    summary = "This process is alive"

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """Always 200."""
        return BytesResponse(200, list(JSON_HEADERS), b'{"status":"ok"}')
