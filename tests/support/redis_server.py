"""A Redis server of the tests' own."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import finalize

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import held_port
from tests.support.utils import wait_until


def redis_program() -> str:
    """The server's program. Tests that need it are skipped if there is none."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server or valkey-server on the path: apt install redis-server")
    return program


class RedisServer:
    """A server that can be stopped, killed, and started again on its port."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.options = options
        self._held = ExitStack()
        finalize(self, self._held.close)
        self.port = self.hold_port()

    def hold_port(self) -> int:
        """A port that belongs to this server as long as this object lives."""
        return self._held.enter_context(held_port())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = redis_program()
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *fixed, "--dir", str(self.folder), *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: _answers(self.port) or self._process.poll() is not None)
        assert self._process.poll() is None, (self.folder / "redis.log").read_text()

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


_SENTINEL = """
port {port}
bind 127.0.0.1
sentinel monitor the-master 127.0.0.1 {master} {quorum}
sentinel down-after-milliseconds the-master 2500
sentinel failover-timeout the-master 2000
"""


@contextmanager
def run_sentinel(folder: Path, master: int, quorum: int) -> Iterator[int]:
    """A sentinel that watches the server on a port as `the-master`; yields its own port."""
    config = folder / "sentinel.conf"
    with held_port() as port, (folder / "sentinel.log").open("ab") as log:
        config.write_text(_SENTINEL.format(port=port, master=master, quorum=quorum))
        command = [redis_program(), str(config), "--sentinel"]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_until(lambda: _answers(port))
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    # by itself it would try again for seconds
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
