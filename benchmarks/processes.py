"""Run the processes of a benchmark: engines, the proxy as `tokenproxy serve` runs it, other gateways, Redis.

Linux only: processes are pinned to cores, and their CPU time is read from /proc.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
_LISTENS = re.compile(r"running on http://127\.0\.0\.1:(\d+)")
_START_TIMEOUT_S = 120.0
_RESTING, _REST_TIMEOUT_S = 0.03, 60.0
"""Share of a core below which a process is at rest, and how long to wait for that."""


class StartError(Exception):
    """A process did not start; the message has the end of its log, or tells what to install."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The core of each process. The proxy has one of its own if there are at least two."""

    engine: int
    client: int
    proxy: int

    @classmethod
    def pick(cls) -> "Cores":
        """Choose among the cores that this process may use. With two, engine and client share the first."""
        free = sorted(os.sched_getaffinity(0))
        return cls(engine=free[0], client=free[-2:][0], proxy=free[-1])


@dataclass(frozen=True, slots=True)
class Running:
    """A running process that listens on a port."""

    pid: int
    port: int
    core: int
    """That it is pinned to; -1 for all."""

    def cpu_s(self) -> float:
        """CPU seconds that it and the processes that it started have used, to the nanosecond."""
        return cpu_s(self.pid)

    def workers_cpu_s(self) -> dict[int, float]:
        """The same of each process that it started, by id."""
        return {pid: cpu_s(pid) for pid in children(self.pid)}

    def rest(self) -> None:
        """Wait until it is idle: some programs record after they have responded."""
        deadline = time.monotonic() + _REST_TIMEOUT_S
        while time.monotonic() < deadline:
            before, started = self.cpu_s(), time.monotonic()
            time.sleep(0.2)
            if self.cpu_s() - before <= _RESTING * (time.monotonic() - started):
                return

    def written_bytes(self) -> int:
        """Bytes of file pages that it has changed. A page that is changed again before it is written counts
        once, and files in memory do not count."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("write_bytes:")))

    def rss_mib(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of those below it.

    The number of a process' clock is Linux': the inverted id, and 2 for the scheduler's time of all threads.
    """
    with suppress(OSError):  # it has just ended
        return time.clock_gettime((~pid << 3) | 2) + sum(map(cpu_s, children(pid)))
    return 0.0


def children(pid: int) -> list[int]:
    """The ids of the processes that a process has started and that run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def core_busy_s(core: int) -> float:
    """CPU seconds that all processes have used on a core."""
    lines = Path("/proc/stat").read_text().splitlines()
    ticks = next(line for line in lines if line.startswith(f"cpu{core} ")).split()[1:4]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pin this process, and those that it starts, to one core; None changes nothing."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for logs, stores and tokenizers that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="tokenproxy-bench-") as folder:
        yield Path(folder)


@contextmanager
def engines(
    core: int, tokenizer: Path, answers: Mapping[str, msgspec.Struct] | None = None, *flags: str
) -> Iterator[list[int]]:
    """Run engines in one process (`benchmarks.engine`); yields their ports.

    Args:
        answers: canned answers by name; None for engines that sample, at the speed of a model of vLLM.
    """
    command = [sys.executable, "-m", "benchmarks.engine", "--model", str(tokenizer), *flags]
    with scratch_folder() as folder:
        if answers is not None:
            (folder / "answers").write_bytes(msgspec.msgpack.encode(answers))
            command += ["--answers", str(folder / "answers")]
        with _process(command, core, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            ports = list(map(int, process.stdout.readline().split()))
            if not ports:
                raise StartError("the engine did not start")
            yield ports


@contextmanager
def proxy(
    core: int | None, ports: Sequence[int], log: Path, *flags: str, store: str | None = None
) -> Iterator[Running]:
    """Run the proxy in front of engines, and wait until it is ready and has loaded their tokenizer.

    Args:
        core: the core to pin it to; None for all cores of this process.
        flags: more flags of its command.
        store: URL of its store; None is a new SQLite file next to the log.
    """
    store = store or f"sqlite://{log.absolute()}.db"
    command = [sys.executable, "-m", "tokenproxy", "serve", "--port", "0", "--store", store, *flags]
    for port in ports:
        command += ["--upstream", f"http://127.0.0.1:{port}"]
    with log.open("wb") as out, _process(command, core, stdout=out, stderr=out) as process:

        def ready() -> int | None:
            listens = _LISTENS.search(log.read_text())
            return int(listens[1]) if listens and _settled(int(listens[1])) else None

        yield Running(process.pid, _wait(process, ready, "the proxy", log), -1 if core is None else core)


@contextmanager
def gateway(
    command: Sequence[str], core: int, port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run any gateway that listens on `port`, and wait until it lists models."""
    with log.open("wb") as out, _process(command, core, environment, stdout=out, stderr=out) as process:

        def ready() -> int | None:
            models = get_json(port, "/v1/models")
            return port if models and models["data"] else None

        yield Running(process.pid, _wait(process, ready, Path(command[0]).name, log), core)


@contextmanager
def redis_server(core: int, folder: Path) -> Iterator[str]:
    """Run a Redis that writes no snapshots; yields its URL.

    Raises:
        StartError: Redis is not installed.
    """
    program = next(filter(None, map(shutil.which, ("redis-server", "valkey-server"))), None)
    if program is None:
        raise StartError("Redis is not installed: run scripts/install-programs redis")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    log = folder / "redis.log"
    with log.open("wb") as out, _process(command, core, stdout=out, stderr=out) as process:

        def ready() -> int | None:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return port

        _wait(process, ready, "Redis", log)
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _process(
    command: Sequence[str], core: int | None, environment: Mapping[str, str] | None = None, **streams: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENPROXY_")}
    variables = {**kept, "HF_HUB_OFFLINE": "1", **(environment or {})}
    with pinned(core):  # the child inherits it, so it applies to all threads from the start
        process = subprocess.Popen(command, cwd=ROOT, env=variables, **streams)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", ready: Callable[[], int | None], name: str, log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, HTTPException):
            if (port := ready()) is not None:
                return port
        time.sleep(0.05)
    raise StartError(f"{name} did not become ready:\n{log.read_text()[-3000:]}")


def _settled(port: int) -> bool:
    """Whether the proxy is ready, and loads nothing that would disturb the measurement."""
    state = get_json(port, "/ready")
    return state is not None and all(
        engine.get("append") != "loading" and (engine.get("append") != "ready" or engine["template"])
        for engine in state["engines"]
    )


def free_ports(count: int) -> list[int]:
    """Different ports on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a response."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def get_json(port: int, path: str) -> Any:
    """The JSON of a response with status 200; None for another status."""
    status, body = get(port, path)
    return json.loads(body) if status == 200 else None
