"""`GET /ready`: an engine answers, and what each one can do."""

import msgspec

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.engine.protocol import JSON_HEADERS, Answer, BytesAnswer


class Ready(Dialect):
    """200 when at least one engine takes requests, else 503."""

    path = "/ready"
    methods = ("GET", "HEAD")
    summary = "An engine answers"

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """`{"ready", "engines": [{"engine", "ready", "version", "model", "token_in", "append"}]}`."""
        engines = gateway.fleet.report()
        ready = any(engine["ready"] for engine in engines)
        body = msgspec.json.encode({"ready": ready, "engines": engines})
        return BytesAnswer(200 if ready else 503, list(JSON_HEADERS), body)
