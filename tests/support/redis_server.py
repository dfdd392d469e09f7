"""A Redis server of the tests' own."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from proxy import ports

_PATIENCE_S = 20.0


def free_port() -> int:
    """A port where nobody listens."""
    return ports.free_port("127.0.0.1")


@dataclass
class RedisServer:
    """A server that can be stopped, killed, and started again on its port."""

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.fail("these tests start a Redis server: apt install redis-server", pytrace=False)
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *fixed, "--dir", str(self.folder), *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(self.port):
            running = self._process.poll() is None and time.monotonic() < deadline
            assert running, (self.folder / "redis.log").read_text()
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


@contextmanager
def run_redis(folder: Path, *options: str) -> Iterator[int]:
    """A Redis or Valkey server that keeps nothing; yields its port."""
    server = RedisServer(folder, options)
    server.start()
    try:
        yield server.port
    finally:
        server.kill()


def _answers(port: int) -> bool:
    # by itself it would try again for seconds
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
