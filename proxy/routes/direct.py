"""Serves the routes with a fixed path without searching for them: a plain ASGI middleware.

Starlette's router, FastAPI's dependency stack and their handling of exceptions take 80 us of a request; an
endpoint of ours needs none of them.
"""

from collections.abc import Mapping

from proxy.routes.endpoint import Endpoint
from proxy.types import ASGIApp, Receive, Scope, Send


class DirectRoutes:
    """Passes a request to its endpoint by method and path, and every other request to the application."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        await (endpoint or self._app)(scope, receive, send)
