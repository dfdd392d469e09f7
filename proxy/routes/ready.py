"""`GET /ready`: an engine answers, and what each one can do."""

import msgspec

from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.services import Services


class Ready(Route):
    """200 when at least one engine takes requests, else 503."""

    path = "/ready"
    methods = ("GET", "HEAD")
    summary = "An engine answers"

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """`{"ready", "engines": [{"engine", "ready", "version", "model", "token_in", "append"}]}`."""
        engines = gateway.fleet.report()
        ready = any(engine["ready"] for engine in engines)
        body = msgspec.json.encode({"ready": ready, "engines": engines})
        return BytesResponse(200 if ready else 503, list(JSON_HEADERS), body)
