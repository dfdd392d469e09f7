"""From ASGI to a route and back: bodies, credentials, broken streams, clients that leave.

A request is served by one task. A second one listens for the client's disconnect and cancels the first;
closing the engine's response on the way out is what makes vLLM abort.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fastapi
from fastapi.routing import APIRoute
from starlette.routing import Match

from proxy.engine.sse import whole_events
from proxy.errors import ApiError, BodyTooLarge, EngineBroken
from proxy.http import Request, Response, is_event_stream
from proxy.routes.base import Route
from proxy.routes.credentials import EVERYBODY, TenantOf
from proxy.routes.stream_errors import error_event
from proxy.turn.services import Services
from proxy.types import Receive, Scope, Send

log = logging.getLogger("tokenproxy")


class ClientGone(Exception):
    """The client left before its request was complete."""


class Endpoint(fastapi.Response):
    """A route as an ASGI application (a Response, so that FastAPI's routing runs it as it is)."""

    def __init__(self, route: Route, services: Callable[[Scope], Services], tenant_of: TenantOf) -> None:
        self.route = route
        self._services = services
        self._tenant_of = tenant_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            services = self._services(scope)
            # Before the body is read: nobody unknown may fill the memory
            tenant = await self._tenant_of(scope) if self.route.needs_tenant else EVERYBODY
            body = await read_body(scope, receive, services.body_limit_bytes)
        except ClientGone:
            return
        except ApiError as error:
            await send_error(send, error)
            return
        async with _ClientWatch(receive):
            await self._serve(self._request(scope, body, tenant), services, send)

    async def _serve(self, request: Request, services: Services, send: Send) -> None:
        try:
            response = await self.route.answer(request, services)
        except ApiError as error:
            await send_error(send, error)
            return
        try:
            if is_event_stream(response.headers):
                await _send_events(response, request.path, send)
            else:
                await _send_body(response, send)
        finally:
            await response.aclose()

    def _request(self, scope: Scope, body: bytes, tenant: str) -> Request:
        path = self.route.canonical_path(raw_path(scope), scope.get("path_params", {}))
        query: bytes = scope.get("query_string", b"")
        target = f"{path}?{query.decode('latin-1')}" if query else path
        return Request(scope["method"], target, list(scope["headers"]), body, tenant=tenant)


class EndpointRoute(APIRoute):
    """A FastAPI route that leaves the request to its endpoint: no parsing, no validation, no copies."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._fixed = path.partition("{")[0]
        """What every path of this route contains: `/v1/sessions/` of `/v1/sessions/{session}`."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See `starlette.routing.BaseRoute.matches`."""
        # A route with its aliases has four paths: a substring rules most of them out sooner than a regex
        return super().matches(scope) if self._fixed in scope["path"] else (Match.NONE, {})

    def get_route_handler(self) -> Callable[[fastapi.Request], Awaitable[fastapi.Response]]:  # type: ignore[override]
        """The endpoint itself, without FastAPI's handling of parameters."""
        endpoint: Callable[[fastapi.Request], Awaitable[fastapi.Response]] = self.endpoint
        return endpoint


def endpoint_routes(serving: Endpoint) -> list[EndpointRoute]:
    """The routes of a canonical path: one for each method, the first of which is in the OpenAPI page."""
    route = serving.route
    methods = [route.methods] if route.catches_all else [(method,) for method in route.methods]
    return [
        _endpoint_route(serving, route.path, names, shown=not route.catches_all and names == methods[0])
        for names in methods
    ]


def alias_routes(serving: Endpoint, paths: Sequence[str]) -> list[EndpointRoute]:
    """The routes of other paths to the same route. The OpenAPI page does not show them."""
    return [_endpoint_route(serving, path, serving.route.methods, shown=False) for path in paths]


def _endpoint_route(serving: Endpoint, path: str, methods: Sequence[str], *, shown: bool) -> EndpointRoute:
    route = serving.route

    async def endpoint(request: fastapi.Request) -> fastapi.Response:
        return serving

    return EndpointRoute(
        path,
        endpoint,
        methods=list(methods),
        name=type(route).__name__,
        summary=route.summary or None,
        description=route.description,
        openapi_extra=route.openapi or None,
        include_in_schema=shown,
        response_model=None,
    )


def raw_path(scope: Scope) -> str:
    """The path as the client sent it, percent-encoded; without the application's root path."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    root = scope.get("root_path", "").encode()
    if root and path.startswith(root):
        path = path[len(root) :]
    return path.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body.

    Raises:
        BodyTooLarge: it is over the limit, as announced or as counted.
        ClientGone: the client left before it was complete.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is over the limit of {limit} bytes (`body_limit_bytes`)", param="body"
    )


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error object."""
    body = error.body()
    headers = [*error.headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_events(response: Response, path: str, send: Send) -> None:
    await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    try:
        async for chunk in whole_events(response.chunks()):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except ApiError as error:
        log.warning("a stream of %s ends with an error: %s", path, error.message)
        await send({"type": "http.response.body", "body": error_event(path, error), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _send_body(response: Response, send: Send) -> None:
    """Send a body that is no event stream.

    Its head goes out with the first bytes: if the engine breaks before them, the client gets an error object.
    """
    chunks = response.chunks()
    started = False
    try:
        async for chunk in chunks:
            if not started:
                started = True
                await send(
                    {"type": "http.response.start", "status": response.status, "headers": response.headers}
                )
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except EngineBroken as error:
        if started:
            raise  # the server then cuts the connection: a short body must not look complete
        await send_error(send, error)
        return
    if not started:
        await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
    await send({"type": "http.response.body", "body": b""})


class _ClientWatch:
    """Cancels the task inside its `async with` when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._watcher.cancel()
        if self._gone and kind is asyncio.CancelledError:
            self._task.uncancel()
            return True
        return False

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
