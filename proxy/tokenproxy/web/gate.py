"""Checks every request before routing, and gives it its canonical path: a plain ASGI middleware.

It checks the size of the head, the path and the Host header. It also responds to OPTIONS, because browsers
send it without a key, and an engine would respond to clients without a key.
"""

from collections.abc import Iterable, Sequence

from starlette.routing import compile_path

from tokenproxy.base.errors import ApiError, BadRequest, HeadTooLarge
from tokenproxy.base.types import ASGIApp, Receive, Scope, Send
from tokenproxy.web.auth import OPEN_PATHS, host_name
from tokenproxy.web.base import Route
from tokenproxy.web.paths import Paths, check_path, path_of
from tokenproxy.web.sending import send_error

HEAD_LIMIT_BYTES = 64 * 2**10
"""Largest request line with headers."""
_ANY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Methods of a route that the engine serves, because only the engine knows which of them it accepts."""


class Gate:
    """Refuses requests that no route should get, and responds to OPTIONS."""

    def __init__(self, app: ASGIApp, routes: Iterable[Route], allowed_hosts: Sequence[str] = ()) -> None:
        """`allowed_hosts`: empty allows all; `*.example.com` all hosts below it."""
        self._app = app
        self._hosts = frozenset(host.lower() for host in allowed_hosts if not host.startswith("*."))
        self._domains = tuple(host[1:].lower() for host in allowed_hosts if host.startswith("*."))
        own = [route for route in routes if not route.catches_all]
        self._methods = [(compile_path(route.path)[0], route.methods) for route in own]
        self._paths = Paths(route.path for route in own if "{" not in route.path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_head(scope)
            check_path(scope)
            scope = self._paths.of(scope)
            self._check_host(scope, [value for name, value in scope["headers"] if name == b"host"])
        except ApiError as error:
            await send_error(send, error, path_of(scope))
            return
        if scope["method"] == "OPTIONS":
            headers = [(b"allow", ", ".join(self.allowed(path_of(scope))).encode())]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)

    def allowed(self, path: str) -> list[str]:
        """The methods of a canonical path."""
        methods = dict.fromkeys(
            method for regex, methods in self._methods if regex.match(path) for method in methods
        )
        return [*(methods or _ANY_METHOD), "OPTIONS"]

    def _check_head(self, scope: Scope) -> None:
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        for name, value in scope["headers"]:
            size += len(name) + len(value) + 4  # ": " and the line's end
        if size > HEAD_LIMIT_BYTES:
            raise HeadTooLarge(f"the request line and headers are over the limit of {HEAD_LIMIT_BYTES} bytes")

    def _check_host(self, scope: Scope, values: Sequence[bytes]) -> None:
        if len(values) > 1:
            raise BadRequest("a request must have one Host header", param="host")
        if not self._hosts and not self._domains:
            return
        # health checks use the address of a container, which it gets only when it starts
        if scope["method"] in ("GET", "HEAD") and path_of(scope) in OPEN_PATHS:
            return
        host = host_name(values[0]) if values else ""
        if host in self._hosts or host.endswith(self._domains):
            return
        raise BadRequest(
            "this proxy is not served under the name in the Host header: add it to `allowed_hosts`",
            param="host",
            code="host_not_allowed",
        )
