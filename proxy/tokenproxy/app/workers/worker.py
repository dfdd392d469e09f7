"""One worker: a server on the sockets of its parent, which it obeys over a pipe.

Only the parent's second message cuts requests. A signal that a terminal or systemd sends to all processes
therefore counts once: the worker drains on any SIGTERM or SIGINT, as often as it comes.

If the parent ends without a word (SIGKILL), the pipe closes: the worker drains at once, and ends.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

from tokenproxy.app.server import Server, server_config
from tokenproxy.app.workers.metrics import shared_metrics
from tokenproxy.app.workers.supervisor import END_S, SIGNALS, STARTED, Command, Start
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.turn.services import RunningRequests

log = logging.getLogger("tokenproxy")


def main() -> None:
    """Run a worker until its parent stops it; the argument is the file descriptor of its pipe."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the server takes them once it runs
    control = Connection(int(sys.argv[1]))
    start: Start = control.recv()
    settings = start.settings
    configure_logs(settings.log_level, settings.log_format)
    running = RunningRequests()
    metrics = shared_metrics(start.worker, start.metrics)
    config = server_config(settings, running, metrics)
    server = WorkerServer(config, running, settings.stop_delay_s, settings.drain_s)
    server.control, server.announce = control, partial(_report, control)
    server.run([socket.socket(fileno=descriptor) for descriptor in start.sockets])
    if server.orphaned:
        shutil.rmtree(start.metrics, ignore_errors=True)
    # at once: Python would take a second to free the modules and the tokenizers, and wait for threads
    os._exit(0 if server.started else 1)


def _report(control: Connection) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        control.send(STARTED)


class WorkerServer(Server):
    """A server that its parent stops."""

    control: Connection
    """The worker's end of its pipe."""
    orphaned = False
    """Whether the parent has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals and the parent's messages in the event loop while the server runs."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, self._stop_delay_s)
        threading.Thread(target=self._obey, args=[loop], daemon=True).start()
        yield

    def _obey(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the parent's messages, in a thread: a worker whose event loop is blocked ends, too."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the worker has stopped
            try:
                while True:
                    command: Command = self.control.recv()
                    if command is Command.CUT:
                        loop.call_soon_threadsafe(self.stop_now)
                    else:
                        loop.call_soon_threadsafe(self.stop, self._stop_delay_s)
            except (EOFError, OSError):
                self.orphaned = True
                loop.call_soon_threadsafe(self._parent_ended)
        time.sleep(self._drain_s + END_S)
        os._exit(1)

    def _parent_ended(self) -> None:
        log.error("stopping: the parent process has ended")
        self.stop(0.0)
        self._exit()  # another parent may need the port: the rest of `stop_delay_s` is skipped
