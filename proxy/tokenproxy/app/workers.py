"""The parent of `tokenproxy serve --workers N`: it listens, and keeps N workers running.

All workers accept from the sockets that the parent bound. uvicorn's own supervisor would run uvicorn's own
server, which does not drain; and with one socket for each worker (SO_REUSEPORT), connections that the kernel
assigned to a worker that ends are reset, while another proxy on the same port would go unnoticed.

1. The parent binds the sockets and starts one worker. If that does not start, it ends with exit code 1.
2. It starts the others. A worker that ends is started again: at once, and after longer and longer pauses if
   the new one ends soon, too.
3. At SIGTERM or SIGINT it closes its sockets and tells the workers to stop (see `app/server.py`), at a second
   one to cut their requests; a third one kills them. The exit code is 0 if all workers stopped in order.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from tokenproxy.app.start import announce
from tokenproxy.settings import Settings

log = logging.getLogger("tokenproxy")

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client that names the folder with the metrics of all workers."""
STEADY_S = 60.0
"""A worker that served for so long starts anew without a pause."""
LONGEST_PAUSE_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PROGRAM = "import gc, sys; gc.disable(); sys.path[:] = {!r}; from tokenproxy.app.worker import main; main()"
"""A worker imports from the same folders as its parent, independent of the current folder."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker."""

    worker: int
    """Its number, from 1; a worker that replaces another one gets its number."""
    settings: Settings
    sockets: tuple[int, ...]
    """File descriptors of the sockets that all workers listen on."""
    metrics: Path
    """Folder with the metrics of all workers."""


class Command(StrEnum):
    """A later message to a worker."""

    STOP = "stop"
    """Drain, as after a first signal."""
    CUT = "cut"
    """Cut the requests that still run, as after a second signal."""


STARTED = "started"
"""The message of a worker once it accepts connections."""

END_S = 15.0
"""Seconds after `stop_delay_s` and `drain_s` in which a worker must have cut its requests and ended."""


def run_workers(settings: Settings, sockets: Sequence[socket.socket]) -> int:
    """Serve with several processes until a signal arrives; returns the exit code."""
    try:
        with tempfile.TemporaryDirectory(prefix="tokenproxy-metrics-", ignore_cleanup_errors=True) as folder:
            return asyncio.run(Supervisor(settings, sockets, Path(folder)).run())
    except OSError as error:  # the message names the folder
        log.error("the proxy cannot start its workers: %s", error)
        return 1


class _Worker:
    """A running worker process."""

    def __init__(self, process: Process, control: Connection, served: asyncio.Event) -> None:
        """`control`: the parent's end of its pipe; `served`: is set once it accepts connections."""
        self.process = process
        self.started = False
        """Whether it accepted connections."""
        self._started_at = 0.0
        self._control = control
        self._served = served
        asyncio.get_running_loop().add_reader(control.fileno(), self._read)

    def tell(self, command: Command) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(command)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def ended(self) -> int:
        """Wait for its end; returns its exit code, negative for the signal that ended it."""
        code = await self.process.wait()
        self._stop_reading()
        self._control.close()
        return code

    def served_s(self) -> float:
        """Seconds since it started to accept connections; 0 if it did not."""
        return time.monotonic() - self._started_at if self.started else 0.0

    def _read(self) -> None:
        try:
            self._control.recv()  # it sends one message only
        except (EOFError, OSError):
            self._stop_reading()
        else:
            self._started_at = time.monotonic()
            self.started = True
            self._served.set()

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self._control.fileno())


class Supervisor:
    """Starts the workers, starts those again that end, and stops all of them."""

    def __init__(self, settings: Settings, sockets: Sequence[socket.socket], folder: Path) -> None:
        """Nothing runs yet.

        Args:
            sockets: where the workers accept connections; the supervisor closes them.
            folder: for the metrics of the workers.
        """
        self._settings = settings
        self._sockets = sockets
        self._folder = folder
        self._workers: dict[int, _Worker] = {}
        self._served = asyncio.Event()
        """Set once a worker accepts connections."""
        self._stopping = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """Run the workers until a signal arrives; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._add_process("parent", os.getpid())
        kept = [asyncio.create_task(self._keep(1))]
        serving = asyncio.create_task(self._served.wait())
        await asyncio.wait([*kept, serving], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            return 0 if await kept[0] else 1
        announce(self._settings, self._sockets)
        count = self._settings.workers
        kept += [asyncio.create_task(self._keep(number)) for number in range(2, count + 1)]
        await self._stopping.wait()
        ended = asyncio.gather(*kept)
        try:
            settings = self._settings
            async with asyncio.timeout(settings.stop_delay_s + settings.drain_s + END_S):
                return 0 if all(await asyncio.shield(ended)) else 1
        except TimeoutError:
            log.error("stopping: workers that do not end are killed")
            self._kill()
            await ended
            return 1

    async def _keep(self, number: int) -> bool:
        """Run a worker, and start it again until the end; returns whether it stopped in order."""
        soon = 0
        while not self._stopping.is_set():
            try:
                worker = await self._start(number)
            except OSError as error:  # no memory or no file descriptors
                ending, served_s = f"cannot be started: {error}", 0.0
            else:
                code = await worker.ended()
                self._forget(number)
                if self._stopping.is_set():
                    return code == 0 or not worker.started
                ending, served_s = f"(process {worker.process.pid}) {_ending(code)}", worker.served_s()
            if not self._served.is_set():
                log.error("the proxy did not start: its first worker %s", ending)
                return False
            soon = 1 if served_s >= STEADY_S else soon + 1
            pause = restart_pause(soon)
            log.error("worker %d %s; it starts again in %g s", number, ending, pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        return True

    def _add_process(self, name: str, pid: int) -> None:
        """Add a process to the sums of `process_...`; it replaces the earlier one of the same name."""
        (self._folder / f"{name}.pid").write_text(str(pid))

    def _forget(self, number: int) -> None:
        """Forget what a worker had in progress. Its counters stay in the sums."""
        del self._workers[number]
        (self._folder / f"{number}.pid").unlink(missing_ok=True)
        mark_process_dead(number, str(self._folder))  # type: ignore[no-untyped-call]

    async def _start(self, number: int) -> _Worker:
        ours, theirs = Pipe()
        descriptors = tuple(bound.fileno() for bound in self._sockets)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", _PROGRAM.format(sys.path), str(theirs.fileno())),
            stdin=DEVNULL,
            env={**os.environ, FOLDER_VARIABLE: str(self._folder)},
            pass_fds=[theirs.fileno(), *descriptors],
        )
        theirs.close()
        self._add_process(str(number), process.pid)
        worker = self._workers[number] = _Worker(process, ours, self._served)
        with contextlib.suppress(OSError):  # it has ended
            ours.send(Start(number, self._settings, descriptors, self._folder))
        if self._stopping.is_set():
            worker.tell(Command.STOP)
        return worker

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("stopping: %s", number.name)
            self._stopping.set()
            for bound in self._sockets:
                bound.close()  # or connections would wait here after the workers stopped to accept
            self._tell(Command.STOP)
        elif self._signals == 2:
            log.warning("stopping: a second %s cuts what still runs", number.name)
            self._tell(Command.CUT)
        else:
            self._kill()

    def _tell(self, command: Command) -> None:
        for worker in self._workers.values():
            worker.tell(command)

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()


def _ending(code: int) -> str:
    """How a process ended, in words."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def restart_pause(soon: int) -> float:
    """Seconds until a worker starts again that ended soon after its start `soon` times in a row."""
    return min(LONGEST_PAUSE_S, 2.0 ** (soon - 2)) if soon > 1 else 0.0
