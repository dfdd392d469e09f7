"""Accepts connections and starts requests, both bounded for one pass of the event loop.

libuv accepts one connection in a pass of its loop, and a pass serves every connection that is ready. After a
burst of a thousand clients, the last one would wait for as many passes, each with more requests than the one
before: tens of seconds. So:

1. A listener accepts several connections in a pass: twice as many as in the pass before while more wait. It
   begins with one, so that workers which accept from the same socket share small bursts.
2. `STARTS` requests start in a pass, in the order in which their heads arrived; health checks start at once.
"""

import asyncio
import logging
import socket
import ssl
from asyncio import AbstractEventLoop, BaseProtocol, Future
from collections import deque
from collections.abc import Callable

from tokenproxy.base.types import ASGIApp, Receive, Scope, Send
from tokenproxy.web.gate import HEALTH_PATHS

log = logging.getLogger("tokenproxy")

BACKLOG = 65_535
"""Connections that the kernel holds until they are accepted; it lowers this to its limit, somaxconn."""
ACCEPTS = 64
"""Most connections that are accepted in a pass."""
STARTS = 16
"""Requests that start in a pass: a few milliseconds of work."""
RETRY_S = 1.0
"""Pause after a connection that could not be accepted for want of file descriptors or memory."""


class Listener:
    """Accepts the connections of one socket; stands for `asyncio.Server` in uvicorn."""

    def __init__(
        self, bound: socket.socket, protocol: Callable[[], BaseProtocol], context: ssl.SSLContext | None
    ) -> None:
        """Listen and accept from now on.

        Args:
            bound: the socket; the listener closes it.
            context: for TLS; None serves plain HTTP.
        """
        self._socket = bound
        self._protocol = protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._batch = 1
        self._closed = False
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept nothing more and close the socket. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    async def wait_closed(self) -> None:
        """See `asyncio.Server.wait_closed`; connections are closed by their protocols."""

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(self._batch):
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:  # none waits, or another worker took it
                self._batch = 1
                return
            except OSError as error:
                log.error("no connection is accepted for %g s: %s", RETRY_S, error)
                self._loop.remove_reader(self._socket.fileno())
                self._loop.call_later(RETRY_S, self._resume)
                return
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._batch = min(2 * self._batch, ACCEPTS)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._context)
        except OSError as error:  # the client has left, or does not speak TLS
            log.debug("a connection was not opened: %s", error)
            connection.close()


class StartLimit:
    """An ASGI application that starts `STARTS` requests of another one in a pass of the event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._started = 0
        """In this pass."""
        self._waiting: deque[Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, in a later pass if enough were started in this one."""
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            loop = asyncio.get_running_loop()
            if not self._started:
                loop.call_soon(self._next_pass, loop)
            if self._started >= STARTS:
                turn = loop.create_future()
                self._waiting.append(turn)
                await turn
            else:
                self._started += 1
        await self._app(scope, receive, send)

    def _next_pass(self, loop: AbstractEventLoop) -> None:
        self._started = min(STARTS, len(self._waiting))
        for _ in range(self._started):
            turn = self._waiting.popleft()
            if not turn.done():  # else: the server stops
                turn.set_result(None)
        if self._started:
            loop.call_soon(self._next_pass, loop)
