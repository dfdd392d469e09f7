"""Run the processes of a benchmark: the no-op engine, the proxy as `tokenproxy serve` runs it, and Redis.

Linux only: processes are pinned to cores, and their CPU time is read from /proc.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_LISTENS = re.compile(r"running on http://127\.0\.0\.1:(\d+)")
_START_TIMEOUT_S = 120.0


class StartError(Exception):
    """A process did not start; the message has the end of its log."""


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
class Proxy:
    """A running proxy."""

    pid: int
    port: int

    core: int

    def cpu_s(self) -> float:
        """CPU seconds that its process and its workers have used, in user and kernel mode."""
        return tree_cpu_s(self.pid)

    def written_bytes(self) -> int:
        """Bytes of file pages that its process has changed: what is or will be written to the disk.

        A page that is changed again before it is written counts once. Files in memory do not count.
        """
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("write_bytes:")))

    def other_programs_s(self) -> float:
        """CPU seconds that other processes have used on its core."""
        return core_busy_s(self.core) - self.cpu_s()


def tree_cpu_s(pid: int) -> float:
    """CPU seconds that a process and those below it have used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for child in children(pid):
        with suppress(FileNotFoundError):  # it has just ended
            seconds += tree_cpu_s(child)
    return seconds


def process_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of one process, to the nanosecond; `tree_cpu_s` counts in hundredths.

    The number of the clock is Linux': the inverted id, and 2 for the scheduler's time of the whole process.
    """
    return time.clock_gettime((~pid << 3) | 2)


def children(pid: int) -> list[int]:
    """The ids of the processes that a process has started and that run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def core_busy_s(core: int) -> float:
    """CPU seconds that all processes have used on a core."""
    lines = Path("/proc/stat").read_text().splitlines()
    user, nice, system = next(line for line in lines if line.startswith(f"cpu{core} ")).split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def other_programs_s() -> float:
    """CPU seconds that other processes have used on the cores of this process."""
    fields = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    busy = {name: sum(map(int, ticks[:3])) for name, *ticks in fields}
    ours = os.times()
    cores: int = sum(busy[f"cpu{core}"] for core in os.sched_getaffinity(0))
    return cores / os.sysconf("SC_CLK_TCK") - ours.user - ours.system


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
def noop_engine(core: int, tokenizer: Path | None, *, turns: bool = False) -> Iterator[int]:
    """Run the no-op engine; yields its port.

    Args:
        turns: whether it holds conversations; then it loads the tokenizer.
    """
    command = [sys.executable, "-m", "benchmarks.noop", *(["--model", str(tokenizer)] if tokenizer else [])]
    process = _start([*command, *(["--turns"] if turns else [])], core, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            raise StartError("the no-op engine did not start")
        yield int(line)
    finally:
        _end(process)


@contextmanager
def proxy(
    core: int | None,
    engine_port: int | Sequence[int],
    log: Path,
    *,
    store: str | None = None,
    clocks: Path | None = None,
    flags: Sequence[str] = (),
) -> Iterator[Proxy]:
    """Run the proxy in front of engines, and wait until it is ready and has loaded their tokenizer.

    Args:
        core: the core to pin it to; None for all cores of this process.
        engine_port: the port of the engine, or the ports of a fleet.
        flags: more flags of its command.
        store: URL of its store; None is a new SQLite file next to the log.
        clocks: file for the times of its stages; None runs it without timers.
    """
    store = store or f"sqlite://{log.absolute()}.db"
    program = ["benchmarks.clocked", str(clocks)] if clocks else ["proxy.cli"]
    command = [sys.executable, "-m", *program, "serve", "--port", "0", "--store", store, *flags]
    for port in [engine_port] if isinstance(engine_port, int) else engine_port:
        command += ["--upstream", f"http://127.0.0.1:{port}"]
    with log.open("wb") as out:
        process = _start(command, core, stdout=out, stderr=out)
    try:
        port = _wait_ready(process, log)
        yield Proxy(process.pid, port, -1 if core is None else core)
    finally:
        _end(process)


@contextmanager
def engine_fleet(core: int, tokenizer: Path, flags: Sequence[str] = ()) -> Iterator[list[int]]:
    """Run a fleet of fake engines in one process; yields the engines' ports."""
    command = [sys.executable, "-m", "benchmarks.fleet_engines", "--model", str(tokenizer), *flags]
    process = _start(command, core, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ports = list(map(int, process.stdout.readline().split()))
        if not ports:
            raise StartError("the fleet of engines did not start")
        yield ports
    finally:
        _end(process)


@contextmanager
def vllm_router(
    program: Path, core: int, ports: Sequence[int], log: Path, flags: Sequence[str]
) -> Iterator[Proxy]:
    """Run vllm-router in front of engines, and wait until it is ready."""
    port, metrics_port = free_ports(2)
    engines = [f"http://127.0.0.1:{engine}" for engine in ports]
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
    command += ["--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]
    with gateway([*command, "--log-level", "warning", *flags], core, port, log) as running:
        yield running


@contextmanager
def gateway(
    command: Sequence[str], core: int, port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Proxy]:
    """Run any gateway that listens on `port`, and wait until it lists models.

    Args:
        environment: variables next to those of this process.
    """
    with log.open("wb") as out:
        process = _start(list(command), core, environment, stdout=out, stderr=out)
    try:
        _wait_healthy(process, port, log, Path(command[0]).name)
        yield Proxy(process.pid, port, core)
    finally:
        _end(process)


@contextmanager
def gateway_engine(core: int, answers: Path, tokenizer: Path) -> Iterator[int]:
    """Run the engine of `gateway.py`; yields its port.

    Args:
        answers: file of its answers.
        tokenizer: folder that it names as its model.
    """
    with _answering("gateway_engine", core, answers, tokenizer) as port:
        yield port


@contextmanager
def scale_engine(core: int, answers: Path, tokenizer: Path) -> Iterator[int]:
    """Run the engine of `simulate.py`; yields its port. The arguments are those of `gateway_engine`."""
    with _answering("scale_engine", core, answers, tokenizer) as port:
        yield port


@contextmanager
def _answering(program: str, core: int, answers: Path, tokenizer: Path) -> Iterator[int]:
    command = [sys.executable, "-m", f"benchmarks.{program}", str(answers), "--model", str(tokenizer)]
    process = _start(command, core, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip():
            raise StartError("the engine did not start")
        yield int(line)
    finally:
        _end(process)


def free_ports(count: int) -> list[int]:
    """Different ports on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


@contextmanager
def redis_server(core: int, folder: Path, flags: Sequence[str] = ()) -> Iterator[str | None]:
    """Run a Redis that writes nothing to disk; yields its URL, or None if Redis is not installed.

    Args:
        flags: more flags of its command; an append-only file is written to `folder`.
    """
    program = next(filter(None, map(shutil.which, ("redis-server", "valkey-server"))), None)
    if program is None:
        yield None
        return
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = _start([*command, *flags], core, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_listening(process, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        _end(process)


def write_tokenizer(folder: Path) -> None:
    """Write the smallest tokenizer with a chat template: each message is one token.

    With it the proxy loads the same libraries as in production, so that its heap has a realistic size.
    """
    token = {"id": 0, "content": "<turn>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": {"<turn>": 0}, "unk_token": "<turn>"}
    absent = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", **dict.fromkeys(absent), "added_tokens": [{**token, **flags}], "model": model}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<turn>",
        "chat_template": "{% for message in messages %}<turn>{% endfor %}",
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _start(
    command: list[str], core: int | None, environment: Mapping[str, str] | None = None, **streams: Any
) -> "subprocess.Popen[bytes]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENPROXY_")}
    variables = {**kept, "HF_HUB_OFFLINE": "1", **(environment or {})}
    with pinned(core):  # the child inherits it, so it applies to all threads from the start
        return subprocess.Popen(command, cwd=_ROOT, env=variables, **streams)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_listening(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise StartError("the Redis server did not start")


def _wait_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path, name: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, HTTPException):
            models = get_json(port, "/v1/models")
            if models and models["data"]:
                return
        time.sleep(0.1)
    raise StartError(f"{name} did not become ready:\n" + log.read_text()[-3000:])


def get_json(port: int, path: str) -> Any:
    """The JSON of a response with status 200; None for another status."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return json.loads(body) if response.status == 200 else None
    finally:
        connection.close()


def get_metrics(port: int) -> str:
    """The Prometheus metrics of a gateway, as text."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        listens = _LISTENS.search(log.read_text())
        if listens and _settled(int(listens[1])):
            return int(listens[1])
        time.sleep(0.05)
    raise StartError("the proxy did not become ready:\n" + log.read_text()[-3000:])


def _settled(port: int) -> bool:
    """Whether the proxy is ready, and loads nothing that would disturb the measurement."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        state = json.loads(response.read())
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return response.status == 200 and all(_knows_template(engine) for engine in state["engines"])


def _knows_template(engine: dict[str, Any]) -> bool:
    """Whether the tokenizer is loaded and its chat template examined, or neither will be."""
    append = engine.get("append")
    return append != "loading" and (append != "ready" or bool(engine["template"]))
