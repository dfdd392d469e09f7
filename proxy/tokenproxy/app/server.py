"""Run the proxy as a server of its own.

From SIGTERM or SIGINT to the end of the process:

1. `/ready` answers 503. Requests, new ones too, are served for `stop_delay_s`.
2. The socket closes. Running requests have `drain_s` to end.
3. Those that still run are cut: a stream ends with an error event, and what it sampled is recorded; any other
   request gets a 503.
4. The store closes. The exit code is 0.

A second signal skips to 3, a third ends the process without 4. A thread that still works `END_S` after 2 ends
is given up, with exit code 1.

With `workers` above 1, `tokenproxy.app.workers` runs several servers, which stop in the same order.

uvicorn has no limits of time and size of request heads and of lingering bodies with its parser httptools, so
its protocol is subclassed; how requests are parsed and served stays uvicorn's.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenproxy.app.app import create_app
from tokenproxy.app.start import announce, bind, limit_freed_memory, try_store
from tokenproxy.app.workers import END_S, SIGNALS, run_workers
from tokenproxy.base.types import ASGIApp
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import StoreError
from tokenproxy.settings import Settings
from tokenproxy.turn.services import RunningRequests
from tokenproxy.web.gate import HEAD_LIMIT_BYTES, is_loopback

log = logging.getLogger("tokenproxy")

HEAD_TIMEOUT_S = 10.0
"""How long the request line and headers may take to arrive, from the opening of the connection or their first
byte."""
LINGER_S = 10.0
"""How long the rest of a body is read and discarded after the response. A client that sends the whole body
before it reads the response would lose the response if the connection were closed with bytes unread."""

UNSENT_BYTES = 128 * 1024
"""Bytes that the kernel takes for a client before it has sent those that came before. What a client that does
not read has in the kernel, megabytes by default, passed through the proxy and is kept for the record."""
_NOTSENT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS


class _Lingering:
    """The transport of a connection. `close` first lets the client send the rest of its request and read the
    response: a connection that is closed with bytes unread is reset, and the response is lost."""

    def __init__(self, transport: asyncio.Transport, protocol: "GuardedProtocol") -> None:
        self._transport = transport
        self._protocol = protocol
        self.write: Callable[[bytes], None] = transport.write
        self.lingers = False
        """Whether nothing more is sent, and what comes is discarded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport.is_closing`."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close at once where no body is awaited, or at the second call; else wait for the client."""
        if self.is_closing() or not self._protocol.awaits_body:
            self._transport.close()
            return
        self.lingers = True
        self.write = _discard  # a request whose body is malformed has its response, and still runs
        self._protocol.linger()
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()


def _discard(data: bytes) -> None:
    """Writes nothing."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits; it refuses what exceeds them and closes the connection."""

    cycle: Any
    """uvicorn's newest request and response; None before the first."""
    _timer: asyncio.TimerHandle | None = None
    _head_size = 0
    awaits_body = False
    """Whether the next byte belongs to the body of a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering: Any = _Lingering(transport, self)
        super().connection_made(lingering)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6) and _NOTSENT:
            connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT, UNSENT_BYTES)
        self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        of_body = self.awaits_body
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            self._head_size = 0
            return
        if self.awaits_body:
            return  # the rest of a request that already has its response: the connection lingers
        self._head_size += 0 if of_body else len(data)
        if self._head_size > HEAD_LIMIT_BYTES:
            self._refuse("431 Request Header Fields Too Large")
        elif self._timer is None:
            self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def on_headers_complete(self) -> None:
        """The parser's callback after a head."""
        super().on_headers_complete()
        self.awaits_body = True

    def on_message_complete(self) -> None:
        """The parser's callback after a body."""
        super().on_message_complete()
        self.awaits_body = False

    def on_response_complete(self) -> None:
        """uvicorn's callback after a response."""
        super().on_response_complete()
        self._head_size = 0
        if self.awaits_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start(LINGER_S, self.transport.abort)

    def linger(self) -> None:
        """Discard what the client still sends, for a while."""
        self.flow.resume_reading()
        self._start(LINGER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _head_is_late(self) -> None:
        if self._head_size:
            self._refuse("408 Request Timeout")
        else:
            self._close()

    def _refuse(self, status: str) -> None:
        """Close the connection with a response to a request that was not read."""
        if not self.transport.is_closing():
            head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head.encode())
        self._close()

    def _close(self) -> None:
        self._stop()
        self.transport.close()

    def _start(self, seconds: float, then: Any) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn's configuration for accepting connections."""
    return {
        "http": GuardedProtocol,
        # No route takes WebSockets, and the limits would not apply to a connection that became one
        "ws": "none",
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }


def raise_file_limit() -> None:
    """Raise the soft limit of open sockets, which mostly is 1024, to the hard one."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: the kernel's own limit is lower than `unlimited`
        log.warning("the limit of open files stays at %d: %s", soft, error)
    else:
        log.info("the limit of open files is raised from %d to %d", soft, hard)


CUT_S = 5.0
"""How long requests that were cut off may take to record their sampled ids and to send their error."""
_ABORT_S = 1.0
"""How long requests may take to end after their connections were closed."""
_STEP_S = 0.05
GC_THRESHOLDS = (50_000, 20, 50)
"""With Python's own, (700, 10, 10), the search for garbage in the caches takes a sixth of the
CPU time of a small request. Requests make few cycles; reference counting frees the rest."""


def run(settings: Settings) -> int:
    """Serve until a signal arrives; returns the exit code."""
    limit_freed_memory()
    gc.enable()
    configure_logs(settings.log_level, settings.log_format)
    try:
        asyncio.run(try_store(settings))
        sockets = asyncio.run(bind(settings.host, settings.port))
    except (StoreError, OSError) as error:  # the messages name what to do
        log.error(
            "the proxy cannot %s: %s", "listen" if isinstance(error, OSError) else "record turns", error
        )
        return 1
    if not (settings.asks_for_keys or is_loopback(settings.host)):
        log.warning(
            "no keys are set: unless the engines ask for keys, every client that reaches %s:%d may read and "
            "delete what is recorded: set `api_key` (--api-key KEY) or listen on 127.0.0.1",
            settings.host,
            settings.port,
        )
    raise_file_limit()
    if settings.workers > 1:
        return run_workers(settings, sockets)
    running = RunningRequests()
    server = Server(server_config(settings, running), running, settings.stop_delay_s, settings.drain_s)
    server.announce = partial(announce, settings, sockets)
    server.run(sockets)
    return 0 if server.started else 1


def server_config(
    settings: Settings,
    running: RunningRequests,
    metrics: Metrics | None = None,
    app: ASGIApp | None = None,
) -> uvicorn.Config:
    """The configuration of uvicorn for the proxy's application.

    Args:
        metrics: the metrics of this process; None creates them.
        app: another application.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    return uvicorn.Config(
        app or create_app(settings, running, metrics),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        log_config=None,  # uvicorn's log lines use the proxy's handlers and format
        access_log=False,  # the proxy has its own: uvicorn's knows no request ids and no prompts
        # `Server.shutdown` waits itself; this covers the last bytes of closed connections
        timeout_graceful_shutdown=1,
        # SDK clients keep connections for a minute: close later than they do, so that none is closed in use
        timeout_keep_alive=75,
        **connection_options(settings),
    )


class Server(uvicorn.Server):
    """A uvicorn server that drains and cuts its requests before the application closes its store.

    uvicorn's own shutdown cancels tasks that take too long and closes the application while they still run,
    and raises the signal again at the end.
    """

    def __init__(
        self, config: uvicorn.Config, running: RunningRequests, stop_delay_s: float, drain_s: float
    ) -> None:
        super().__init__(config)
        self._running = running
        self._stop_delay_s = stop_delay_s
        self._drain_s = drain_s
        self._cut_now = False
        self._exits = asyncio.Event()
        self.announce: Callable[[], None] = lambda: None
        """Called once it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and the server."""
        await super().startup(sockets)
        self.announce()

    async def main_loop(self) -> None:
        """Renew the date of responses once a second; uvicorn's own loop wakes up ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exits.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the event loop while the server runs; see `uvicorn.Server.capture_signals`."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            self._ignore_signals()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket, drain, cut off the remaining requests, then let uvicorn close the application."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if count := len(self.server_state.tasks):
            log.info("stopping: up to %g s for %d requests to end", self._drain_s, count)
        await self._wait_ended(self._drain_s, unless_cut=True)
        await self._cut()
        await super().shutdown(sockets)
        if not self.lifespan.should_exit:
            log.info("stopped: everything that was sampled is recorded")

    def stop(self, delay_s: float) -> None:
        """Serve for `delay_s` more seconds, then drain. A second call does nothing."""
        if self._running.stopping:
            return
        self._running.stopping = True
        if delay_s:
            log.info("stopping in %g s: until then new requests are served", delay_s)
            asyncio.get_running_loop().call_later(delay_s, self._exit)
        else:
            self._exit()

    def stop_now(self) -> None:
        """Cut the requests that still run."""
        self._running.stopping = self._cut_now = True
        self._exit()

    async def _cut(self) -> None:
        """End the requests that still run with an error; close the connections of those that do not end."""
        if count := self._running.cut():
            log.warning("stopping: %d requests are cut", count)
        await self._wait_ended(CUT_S)
        # requests whose clients do not read, and requests outside the proxy's own routes
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait_ended(_ABORT_S)
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_S)

    async def _wait_ended(self, timeout_s: float, *, unless_cut: bool = False) -> None:
        """Wait until no request runs and all responses are written, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        state = self.server_state
        while (state.tasks or state.connections) and time.monotonic() < deadline:
            if unless_cut and self._cut_now:
                return
            await asyncio.sleep(_STEP_S)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._running.stopping:
            log.warning("stopping: a second %s cuts what still runs", number.name)
            self.stop_now()
            self._ignore_signals()  # the next one ends the process
        else:
            end = threading.Timer(self._stop_delay_s + self._drain_s + END_S, _give_up)
            end.daemon = True
            end.start()
            self.stop(self._stop_delay_s)

    def _exit(self) -> None:
        """Let the main loop end, after which uvicorn calls `shutdown`."""
        self.should_exit = True
        self._exits.set()

    def _ignore_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _give_up() -> None:
    """End the process although a thread still works. The store is closed by then."""
    log.error("stopping: a thread still works, perhaps for a client that left: its work is given up")
    os._exit(1)
