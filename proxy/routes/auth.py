"""The proxy's own API keys, as a plain ASGI middleware."""

import secrets
from collections.abc import Sequence

from proxy.errors import Unauthorized
from proxy.routes.credentials import SCOPE_KEY, tenant_of_key
from proxy.routes.endpoint import send_error
from proxy.types import ASGIApp, Headers, Receive, Scope, Send

OPEN_PATHS = frozenset(
    {"/health", "/health/", "/ready", "/ready/", "/metrics", "/metrics/"},
)
"""For health checks and scrapers, which have no key."""


class ApiKeys:
    """Lets requests through that carry one of the keys, and puts their tenant into the scope.

    The keys are the proxy's, not the engine's: headers that carry one are removed before the request goes on.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._tenants = [tenant_of_key(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        # A request that was let through comes by again if it has a session in its path
        if scope["type"] != "http" or SCOPE_KEY in scope:
            await self._app(scope, receive, send)
            return
        tenant, headers = self._verify(scope["headers"])
        if tenant is not None:
            await self._app({**scope, "headers": headers, SCOPE_KEY: tenant}, receive, send)
        elif _path(scope) in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
        else:
            error = Unauthorized(
                "send an API key of this proxy as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
                code="invalid_api_key",
            )
            await send_error(send, error)

    def _verify(self, headers: Headers) -> tuple[str | None, Headers]:
        """The tenant of the first header with one of the keys, and the headers without any of them."""
        found: str | None = None
        kept: Headers = []
        for pair in headers:
            tenant = self._tenant(*pair)
            if tenant is None:
                kept.append(pair)
            elif found is None:
                found = tenant
        return found, kept

    def _tenant(self, name: bytes, value: bytes) -> str | None:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                return None
        elif name == b"x-api-key":
            key = value
        else:
            return None
        # Digests have one length, and all are compared: the time tells nothing about the keys
        sent, found = tenant_of_key(key.strip()), None
        for tenant in self._tenants:
            if secrets.compare_digest(sent, tenant):
                found = tenant
        return found


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
