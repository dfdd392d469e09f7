"""One worker: a server on the sockets of its parent, which it obeys over a pipe.

Only the parent's second message cuts requests. A signal that a terminal or systemd sends to all processes
therefore counts once: the worker drains on any SIGTERM or SIGINT, as often as it comes.

If the parent ends without a word (SIGKILL), the pipe closes: the worker drains at once, and ends.

Each worker writes its metrics to files of prometheus_client's multi-process mode, and any worker reads the
files of all. The files are named by the worker's number instead of its process id: a worker that is started
again continues the counters of the one before, so sums never fall, and the number of files stays constant.
"""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tokenproxy.app.server import Server, server_config
from tokenproxy.app.workers import END_S, SIGNALS, STARTED, Command, Start
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.turn.services import RunningRequests

log = logging.getLogger("tokenproxy")

_STATE = "tokenproxy_replica_state"
_OLDEST = "process_start_time_seconds"


def main() -> None:
    """Run a worker until its parent stops it; the argument is the file descriptor of its pipe."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the server takes them once it runs
    gc.enable()
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


# --- metrics


def shared_metrics(worker: int, folder: Path) -> Metrics:
    """Create the metrics of a worker, whose page shows the sums of all workers.

    The environment variable must name the folder, and no other metrics may exist in this process.
    """
    # prometheus_client reads this name for each metric that it creates
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
    merged = CollectorRegistry()
    merged.register(_MergedMetrics(folder))
    merged.register(_Processes(folder))
    return Metrics(shared=merged)


class _MergedMetrics(Collector):
    """The sums of all workers, without replicas that were removed from the fleet."""

    def __init__(self, folder: Path) -> None:
        self._files = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Read the files."""
        metrics: list[Metric] = list(self._files.collect())  # type: ignore[no-untyped-call]
        states = [sample for metric in metrics if metric.name == _STATE for sample in metric.samples]
        present = {sample.labels["replica"] for sample in states if sample.value}
        gone = {sample.labels["replica"] for sample in states} - present
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if sample.labels.get("replica") not in gone]
            yield metric


class _Processes(Collector):
    """The sums of `process_...` over the workers and their parent; the start is that of the oldest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Read them from the operating system."""
        sums: dict[str, Metric] = {}
        for file in self._folder.glob("*.pid"):
            for metric in _of_process(file):
                first = sums.setdefault(metric.name, metric)
                if first is not metric:
                    ours, theirs = first.samples[0], metric.samples[0]
                    combine = min if metric.name == _OLDEST else sum
                    first.samples[0] = ours._replace(value=combine((ours.value, theirs.value)))
        return sums.values()


def _of_process(file: Path) -> list[Metric]:
    try:
        pid = int(file.read_text())
    except (OSError, ValueError):  # the process has just ended or started
        return []
    return list(ProcessCollector(pid=lambda: pid, registry=None).collect())
