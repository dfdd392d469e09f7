"""A Redis server of the tests' own."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_PATIENCE_S = 20.0


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_redis(folder: Path, *options: str) -> Iterator[int]:
    """A Redis or Valkey server that keeps nothing; yields its port."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.fail("these tests start a Redis server: apt install redis-server", pytrace=False)
    port = free_port()
    fixed = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(
            [program, *fixed, "--dir", str(folder), *options], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(port):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "redis.log").read_text()
            time.sleep(0.01)
        yield port
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    # by itself it would try again for seconds
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
