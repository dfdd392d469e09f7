"""`tokenproxy serve` as a process of its own, whose memory can be measured."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from proxy.ports import free_port
from tests.support.child_environment import python_path_without_torch
from tests.support.fake_vllm import FakeVllm
from tests.support.utils import wait_until

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class ProxyProcess:
    """A running proxy."""

    pid: int
    client: httpx.Client
    """Knows its address as `base_url`."""

    def memory_mib(self, *, peak: bool = False) -> float:
        """Its resident memory; or the most that it had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        name = "VmHWM:" if peak else "VmRSS:"
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) / 1024


@contextmanager
def run_proxy_process(engine: FakeVllm, *flags: str) -> Iterator[ProxyProcess]:
    """Serve before an engine, and wait until messages can be appended."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", engine.url, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": python_path_without_torch()}
    process = subprocess.Popen(
        [*command, "--store", "memory:", "--log-level", "error", *flags], env=environment
    )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE_S, trust_env=False
        ) as client:
            wait_until(lambda: _can_append(client), _PATIENCE_S)
            yield ProxyProcess(process.pid, client)
    finally:
        process.kill()
        process.wait()


def _can_append(client: httpx.Client) -> bool:
    try:
        [engine] = client.get("/ready").json()["engines"]
    except httpx.TransportError:
        return False
    return bool(engine["ready"] and engine["append"] == "ready" and engine["template"])
