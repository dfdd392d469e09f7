"""`tokenproxy serve` as a process of its own: for signals, memory and limits, which a thread cannot have."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from tests.support.child_environment import python_path_without_torch
from tests.support.utils import wait_until

_PATIENCE_S = 60.0
_ADDRESS = re.compile(r"running on (http://\S+)")


class ServeProcess:
    """Starts on entry, and waits until it listens; on exit it is killed if it still runs."""

    def __init__(
        self, upstreams: Sequence[str], log: Path, *flags: str, port: int = 0, ulimit: str | None = None
    ) -> None:
        """Nothing runs yet.

        Args:
            log: the file for its log.
            flags: more flags of `tokenproxy serve`.
            ulimit: its limit on open files, as the shell's `ulimit` takes it; None inherits.
        """
        self.log = log
        serve = [sys.executable, "-m", "tokenproxy", "serve", "--port", str(port)]
        engines = [word for url in upstreams for word in ("--upstream", url)]
        limited = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh"] if ulimit else []
        self._command = [*limited, *serve, *engines, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> "ServeProcess":
        try:
            self.start()
        except BaseException:  # also a timeout of the test: nothing else would end the process
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def workers(self) -> list[int]:
        """The process ids of its workers; none with `--workers 1`."""
        return list(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))

    @property
    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    @property
    def memory(self) -> int:
        """Its resident memory in bytes."""
        return self._status("VmRSS")

    @property
    def peak_memory(self) -> int:
        """The most resident memory that it had, in bytes."""
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024

    def start(self) -> None:
        """Start it, and wait until it listens."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path_without_torch()}
        with self.log.open("ab") as log:
            start = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        self._wait(lambda: _ADDRESS.search(self.text, start))
        self.url = _ADDRESS.findall(self.text)[-1]

    def wait_ready(self, engines: int = 1) -> None:
        """Wait until so many engines respond and their chat templates were examined."""
        # one client for all questions: to create one takes more time of the CPU than the proxy's answer
        with httpx.Client(base_url=self.url, trust_env=False, timeout=_PATIENCE_S) as client:

            def examined() -> bool:
                state = client.get("/ready").json()
                found = sum(bool(each.get("template")) for each in state["engines"])
                return bool(state["ready"]) and found >= engines

            self._wait(examined)

    def wait_workers_ready(self, count: int) -> None:
        """Wait until `count` workers have examined the chat template; those that ended count too."""
        self._wait(lambda: self.text.count("chat template of") >= count)

    def _wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds. Raises AssertionError with its log if it ends before."""
        process = self._process
        assert process is not None
        wait_until(lambda: condition() or process.poll() is not None, _PATIENCE_S)
        assert process.poll() is None, self.text[-3000:]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = _PATIENCE_S) -> int:
        """Its exit code, once it ended."""
        assert self._process is not None
        return self._process.wait(timeout_s)


def metrics_folder(worker: int) -> Path:
    """The folder with the metrics of all workers, by the process id of one."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    name = b"PROMETHEUS_MULTIPROC_DIR="
    [folder] = [variable for variable in variables if variable.startswith(name)]
    return Path(folder.removeprefix(name).decode())


def is_process(pid: int) -> bool:
    """Whether a process of this id runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
