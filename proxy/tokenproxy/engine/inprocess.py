"""An engine in the same process: vLLM's own routes, called as an ASGI application.

It uses only what vLLM's FastAPI application exposes: the routes registered before the plugin, the exception
handlers and the state. A request passes the same validation, parsers and cancellation as one from the
network, without a socket.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.http import Request
from tokenproxy.base.types import ASGIApp, Headers, Message, Receive, Scope, Send
from tokenproxy.engine.protocol import Call
from tokenproxy.engine.versions import scale_out_routes

if TYPE_CHECKING:
    from fastapi import FastAPI

_QUEUED_CHUNKS = 64


def inner_app(app: "FastAPI") -> "FastAPI":
    """An application with the routes that vLLM has registered so far, which shares vLLM's state.

    It has the routes for scaling out too, whether or not clients may use them: only the proxy reaches it.
    """
    from fastapi import FastAPI
    from starlette.routing import Route

    inner = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    inner.router.routes[:] = [*scale_out_routes(), *app.router.routes]
    inner.state = app.state
    # vLLM registers its handlers after the plugins ran: share the mapping, a copy would miss them
    inner.exception_handlers = app.exception_handlers
    router, found = inner.router, dict[tuple[str, str], Route]()

    async def find(scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; its route is searched once: vLLM's chat route comes after two dozen others."""
        if (route := found.get((scope["method"], scope["path"]))) is not None:
            scope.update(route.matches(scope)[1], router=router)
            await route.handle(scope, receive, send)
            return
        await router.app(scope, receive, send)
        if isinstance(route := scope.get("route"), Route) and route.path == scope["path"]:
            found[scope["method"], route.path] = route

    router.middleware_stack = find
    return inner


class InProcessEngine:
    """vLLM, called without a socket."""

    def __init__(self, app: ASGIApp, name: str = "in-process") -> None:
        self.name = name
        self._app = app

    async def send(self, request: Request) -> "InProcessResponse":
        """See `Engine.send`."""
        response = InProcessResponse(self._app, request)
        await response.start()
        return response

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """Does nothing: the engine is this process."""

    async def aclose(self) -> None:
        """Does nothing: there is no connection to close."""


class InProcessResponse:
    """One call of the application, which runs as a task. Closing it is a client disconnect."""

    def __init__(self, app: ASGIApp, request: Request) -> None:
        self.status = 0
        self.headers: Headers = []
        self._request = request
        self._body_sent = False
        self._disconnected = asyncio.Event()
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUED_CHUNKS)
        self._task = asyncio.create_task(self._run(app))
        self._ended = False
        self.call: Call | None = None
        """What observes its waits and its end."""

    async def start(self) -> None:
        """Wait for the status and headers.

        Raises:
            EngineBroken: the application ended without a response.
        """
        try:
            message = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if message is None:
            self._ended = True
            raise self._broken_error()
        self.status = message["status"]
        self.headers = [(name.lower(), value) for name, value in message.get("headers", [])]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as the application sends them."""
        while not self._ended:
            began = perf_counter()
            message = await self._queue.get()
            if self.call is not None:
                self.call.exchange.waited_s += perf_counter() - began
            if message is None:
                self._ended = True
                raise self._broken_error()
            if not message.get("more_body", False):
                self._ended = True
            if body := message.get("body", b""):
                yield bytes(body)

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Report a client disconnect to the application, as a server would, and wait until it ends."""
        if self.call is not None:
            self.call.end()
        self._disconnected.set()
        while not self._task.done():
            # the application may be waiting for space in the queue
            while not self._queue.empty():
                self._queue.get_nowait()
            await asyncio.wait([self._task], timeout=0.05)
        if not self._task.cancelled():
            self._task.exception()  # retrieved so that asyncio does not warn; vLLM has logged it already

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(app), self._receive, self._queue.put)
        finally:
            await self._queue.put(None)

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    def _scope(self, app: ASGIApp) -> Scope:
        path, _, query = self._request.path.partition("?")
        length = (b"content-length", str(len(self._request.body)).encode())
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*(pair for pair in self._request.headers if pair[0] != b"content-length"), length],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }

    def _broken_error(self) -> EngineBroken:
        cause = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        error = EngineBroken("the engine broke off in the middle of its response")
        error.__cause__ = cause
        if self.call is not None:
            self.call.end(error)
        return error
