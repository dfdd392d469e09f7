"""The proxy's own API key, as a plain ASGI middleware."""

import secrets

from proxy.errors import Unauthorized
from proxy.types import ASGIApp, Receive, Scope, Send

_CHECKED = "tokenproxy.key_checked"
"""Set in the scope of a request that was let through: it may come by again under another path."""

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKey:
    """Lets requests through that carry the key; health checks and scrapers need none.

    The key is ours, not the engine's: it is taken off before the request goes on.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http" or scope.get(_CHECKED):
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._key):
            kept = [pair for pair in headers if pair[0] != b"authorization"]
            await self._app({**scope, "headers": kept, _CHECKED: True}, receive, send)
        elif scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
        else:
            error = Unauthorized(
                "send the proxy's API key as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
            body = error.body()
            head = [
                *error.headers(),
                (b"www-authenticate", b"Bearer"),
                (b"content-length", b"%d" % len(body)),
            ]
            await send({"type": "http.response.start", "status": error.status, "headers": head})
            await send({"type": "http.response.body", "body": body})
