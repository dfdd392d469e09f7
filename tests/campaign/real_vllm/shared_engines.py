"""Engines that all processes of a test run share (`pytest -n 2`).

The first process that needs them starts them, and stops them at its end. Locks of the file system count the
processes, because the kernel releases those of a process that dies.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.demo.errors import EngineStartError
from proxy.demo.progress import Progress, print_progress
from proxy.demo.stack import EngineProcess


class JoinedEngine(EngineProcess):
    """An engine that another process of the test run started, and that only that process stops."""

    def __init__(self, model: Path, url: str, pid: int, log_file: Path) -> None:
        super().__init__(model, port=int(url.rpartition(":")[2]), log_file=log_file)
        self._pid = pid

    @property
    def pid(self) -> int | None:
        """See `EngineProcess.pid`."""
        return self._pid

    def start(self) -> None:
        """Raises RuntimeError: it runs already."""
        raise RuntimeError("another test process started this engine: run a test that restarts it without -n")

    def stop(self, grace_s: float = 15.0, progress: Progress = print_progress) -> None:
        """Raises RuntimeError: other tests use it."""
        raise RuntimeError("another test process stops this engine: run a test that stops it without -n")

    def check_alive(self) -> None:
        """See `EngineProcess.check_alive`."""
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            raise EngineStartError(f"vLLM ended; its log ends with:\n{self.log_tail()}") from None


def shared_log(folder: Path, name: str) -> Path:
    """The file for the output of an engine."""
    return folder / f"{name}.log"


@contextmanager
def share_engines(
    engines: dict[str, EngineProcess], model: Path, folder: Path
) -> Iterator[dict[str, EngineProcess]]:
    """Start engines, or join those that another process of the test run started; they may not be ready yet.

    The process that started them waits at its end until all others have left.

    Args:
        engines: by name, not started yet; their output goes to `shared_log`. The same in all processes.
        model: the folder of a checkpoint.
        folder: an existing folder, the same in all processes.
    """
    started = folder / "engines.json"
    with (folder / "starting").open("w") as starting, (folder / "users").open("w") as users:
        fcntl.flock(starting, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        if started.exists():
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield {
                name: JoinedEngine(model, url, pid, shared_log(folder, name))
                for name, (url, pid) in json.loads(started.read_text()).items()
            }
            return
        try:
            for engine in engines.values():
                engine.start()
            started.write_text(json.dumps({name: (each.url, each.pid) for name, each in engines.items()}))
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield engines
            fcntl.flock(starting, fcntl.LOCK_EX)
            started.unlink()  # a process that comes now starts engines of its own
            fcntl.flock(users, fcntl.LOCK_EX)
        finally:
            for engine in engines.values():
                engine.stop()
