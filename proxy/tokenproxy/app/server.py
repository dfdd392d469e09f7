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
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from tokenproxy.app.app import create_app
from tokenproxy.app.connections import GuardedProtocol, connection_options
from tokenproxy.app.listener import Listener, StartLimit
from tokenproxy.app.start import announce, bind, return_large_blocks, try_store
from tokenproxy.app.workers import END_S, SIGNALS, run_workers
from tokenproxy.base.types import ASGIApp
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import StoreError
from tokenproxy.settings import Settings
from tokenproxy.turn.services import RunningRequests
from tokenproxy.web.gate import is_loopback

log = logging.getLogger("tokenproxy")


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

SWITCH_S = 0.002
"""How long a thread that renders a history may keep the event loop from running. Python's own 5 ms let it
wait 6.4 ms, the median of a history of 128k ids; with this 3.4 ms."""


def run(settings: Settings) -> int:
    """Serve until a signal arrives; returns the exit code."""
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
    sys.setswitchinterval(SWITCH_S)
    return_large_blocks()
    return uvicorn.Config(
        StartLimit(app or create_app(settings, running, metrics)),
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
        """Start the application, then accept connections from the sockets."""
        await super().startup([])
        protocol = partial(GuardedProtocol, self.config, self.server_state, self.lifespan.state)
        self.servers: list[Listener] = [  # type: ignore[assignment]  # uvicorn only closes them
            Listener(bound, protocol, self.config.ssl) for bound in sockets or ()
        ]
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
