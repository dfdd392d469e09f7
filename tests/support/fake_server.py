"""The HTTP server of a fake engine: records requests; breaks, delays and holds answers. Knows no route."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import finalize

from aiohttp import web

from tests.support.fake_wire import Canned, Reply
from tests.support.ports import held_port

T = TypeVar("T")
_PATIENCE_S = 10.0
_DONE = b"data: [DONE]\n\n"
_DEAD = b'data: {"error":{"message":"EngineCore encountered an issue.","code":500}}\n\ndata: [DONE]\n\n'
"""What vLLM's API server sends to the streams of a core that died."""


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    """Path and query, as on the wire."""
    headers: list[tuple[bytes, bytes]]
    body: bytes
    reused: bool
    """Whether its connection had carried a request before."""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    def header(self, name: str) -> bytes | None:
        """The value of a header, or None."""
        return next((value for key, value in self.headers if key.lower() == name.encode()), None)


class FakeServer:
    """A server in a thread of its own. It can be killed, and started again on its port."""

    def __init__(self, port: int) -> None:
        """Nothing listens yet. `port` 0 chooses one that nobody else gets while this object lives."""
        self._held = ExitStack()
        finalize(self, self._held.close)
        self.port = port or self._held.enter_context(held_port())
        self.running = 0
        self.reset()
        self.alive = False
        self._connections: set[object] = set()

    def reset(self) -> None:
        """Forget what was seen, and end all faults."""
        self.slow_s: dict[str, float] = {}
        """How long answers of a path take."""
        self.requests: list[Seen] = []
        self.aborted = 0
        self.held = 0
        """How many answers have waited for `release`."""
        self.canned: dict[str, Canned] = {}
        self.endless: dict[str, bytes] = {}
        """Paths that stream this event again and again after `release`."""
        self.endless_pause_s = 0.01
        self.hang_up: Callable[[Seen], bool] = lambda seen: False
        """Requests whose connection is closed without an answer."""
        self.deadly: Callable[[Seen], bool] = lambda seen: False
        """Requests that end the server at once."""
        self._released = asyncio.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, after a kill on the port it had before."""
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._listen())
        self.alive = True

    def kill(self) -> None:
        """End it at once, like SIGKILL: all connections break, nothing listens any more."""
        if self.alive:
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_PATIENCE_S)
            self._loop.close()

    def release(self) -> None:
        """Continue the answers that are held."""
        self._loop.call_soon_threadsafe(self._released.set)

    def seen(self, path: str) -> list[Seen]:
        """The requests for a path, oldest first."""
        return [request for request in self.requests if request.path == path]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.01,  # 0 is no timeout: a connection accepted last would be waited for
            auto_decompress=False,
            max_line_size=2**20,  # like vLLM, which takes long lines and headers
            max_field_size=2**20,
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()

    async def _stop(self) -> None:
        self.alive = False
        await self._site.stop()
        await self._close_connections()
        await self._runner.cleanup()

    async def _close_connections(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    def _allowed(self, seen: Seen) -> bool:
        """Whether a request has the credentials that its path needs."""
        raise NotImplementedError

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        """Answer a request whose path has no fixed answer."""
        raise NotImplementedError

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        peer = (request.transport or asyncio.Transport()).get_extra_info("peername")
        seen = Seen(
            request.method,
            request.raw_path,
            list(request.raw_headers),
            await request.read(),
            peer in self._connections,
        )
        self._connections.add(peer)
        self.requests.append(seen)
        await asyncio.sleep(self.slow_s.get(seen.path, 0))
        if self.deadly(seen):
            threading.Thread(target=self.kill).start()
            await asyncio.Event().wait()
        if self.hang_up(seen):
            raise _break(request, "reset")
        if not self._allowed(seen):
            return respond(Canned(b'{"error":"Unauthorized"}', 401, {"content-type": "application/json"}))
        if seen.path in self.canned:
            return respond(self.canned[seen.path])
        if seen.path in self.endless:
            return await self._stream_endlessly(request, self.endless[seen.path])
        return await self._answer(request, seen)

    async def _finish(
        self, request: web.Request, reply: Reply, events: list[bytes], kind: str = "text/event-stream"
    ) -> web.StreamResponse:
        """Send an answer as its script says, and notice when the client leaves."""
        response = web.StreamResponse(headers={"content-type": kind})
        stream = kind == "text/event-stream"
        async with self._counted() as settle:
            if stream:
                await response.prepare(request)
            for position, event in enumerate(events):
                await self._before(request, reply, event)
                if position == reply.hold_at:
                    self.held += 1
                    await self._released.wait()
                if position in (reply.error_at, reply.done_at):
                    await response.write(_DEAD if position == reply.error_at else _DONE)
                    break
                breaks = position == reply.break_at
                if not stream and (not breaks or reply.how in ("head", "inside", "chunked")):
                    if reply.how != "chunked":
                        response.content_length = len(event)
                    await response.prepare(request)
                if breaks:
                    settle()
                    if reply.how in ("inside", "chunked"):
                        await response.write(event[: len(event) // 2])
                    raise _break(request, reply.how)
                await response.write(event)
            await response.write_eof()
            settle()
        return response

    async def _before(self, request: web.Request, reply: Reply, event: bytes) -> None:
        """Wait before an event of an answer."""
        if event.startswith(b"data: "):
            await asyncio.sleep(reply.pause_s)

    async def _stream_endlessly(self, request: web.Request, event: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        async with self._counted():
            await response.prepare(request)
            await self._released.wait()
            while True:  # until the client leaves, which cancels it
                await response.write(event)
                await asyncio.sleep(self.endless_pause_s)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[Callable[[], None]]:
        """Counts a running generation, and an aborted one unless it was settled before."""
        settled = False

        def settle() -> None:
            nonlocal settled
            settled = True

        self.running += 1
        try:
            yield settle
        finally:
            # in this order: a test that finds it at rest looks at the aborted ones next
            self.aborted += not settled
            self.running -= 1


def _break(request: web.Request, how: str) -> BaseException:
    """Break a connection; the result ends its handler without another word."""
    transport = request.transport
    assert transport is not None
    if how == "reset":
        # SO_LINGER of zero seconds makes the close a reset
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.abort()
    else:
        transport.close()
    return asyncio.CancelledError()


def respond(canned: Canned) -> web.Response:
    """The response of a fixed answer."""
    return web.Response(body=canned.body, status=canned.status, headers=canned.headers)
