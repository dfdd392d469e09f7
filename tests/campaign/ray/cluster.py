"""A Ray cluster of one node, of the tests' own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.utils import wait_until
from tokenproxy.app.children import child_environment, end_group, free_port

_BIN = Path(sys.executable).parent
_HANDLED = re.compile(r" default_Proxy (?P<replica>\w+) (?P<request>[\w-]+) -- POST ")
_START_S = 120.0
_WAIT = """
import time
import ray
from ray import serve

ray.init(log_to_driver=False)
for _ in range(2400):
    application = serve.status().applications["default"]
    assert application.status.name != "DEPLOY_FAILED", application.message
    if application.status.name == "RUNNING":
        break
    time.sleep(0.1)
else:
    raise TimeoutError(application.message)
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster with Ray Serve."""

    folder: Path
    port: int
    http_port: int

    @property
    def url(self) -> str:
        """Where Ray Serve listens."""
        return f"http://127.0.0.1:{self.http_port}"

    def run(self, config: Mapping[str, Any]) -> None:
        """`serve run` with one application; it takes the place of the one before."""
        file = self.folder / "serve.yaml"
        path = "tokenproxy.app.serve_app:build"
        application = {"name": "default", "import_path": path, "route_prefix": "/"}
        file.write_text(yaml.safe_dump({"applications": [application | dict(config)]}))
        self.command("serve", "run", "--non-blocking", str(file))
        self.command("python", "-c", _WAIT)  # the command returns before the application runs

    def command(self, *words: str) -> str:
        """A command of Ray; the value is what it printed."""
        done = subprocess.run(
            [str(_BIN / words[0]), *words[1:]],
            env=_environment() | {"RAY_ADDRESS": f"127.0.0.1:{self.port}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, output
        return output

    def processes(self, title: str) -> list[int]:
        """Ids of this cluster's actors with a title, as `ServeReplica:default:Proxy`."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _command(folder).startswith(f"ray::{title}"):
                parent = _parent(folder)
                if parent is not None and str(self.folder) in _command(parent):
                    found.append(int(folder.name))
        return found

    def replicas_of(self, requests: list[str]) -> list[str]:
        """Which replica of the proxy handled each request, by Ray Serve's own log, which may lag behind."""
        handled: dict[str, str] = {}

        def all_found() -> bool:
            for file in self.folder.glob("session_*/logs/serve/replica_default_Proxy_*.log"):
                for found in _HANDLED.finditer(file.read_text()):
                    handled[found["request"]] = found["replica"]
            return set(requests) <= set(handled)

        wait_until(all_found, 30)
        return [handled[request] for request in requests]


@contextmanager
def run_cluster(folder: Path, cpus: int = 8) -> Iterator[Cluster]:
    """A node with Ray Serve. `folder` has to be short: Ray puts sockets below it."""
    port, http_port, client_port = (free_port("127.0.0.1") for _ in range(3))
    cluster = Cluster(folder, port, http_port)
    command = [
        *(str(_BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address", "127.0.0.1", "--port", str(cluster.port), "--num-cpus", str(cpus)),
        *("--temp-dir", str(folder), "--include-dashboard", "false"),
        *("--ray-client-server-port", str(client_port), "--object-store-memory", str(100 * 2**20)),
    ]
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until(lambda: _started(folder / "ray.log", process), _START_S)
        cluster.command("serve", "start", "--http-host", "127.0.0.1", "--http-port", str(cluster.http_port))
        yield cluster
    finally:
        end_group(process.pid, 5)  # with all that it started, but for engines, which end with their parents
        process.wait()


def _started(log: Path, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, log.read_text()
    return "Ray runtime started" in log.read_text()


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _parent(process: Path) -> Path | None:
    try:
        state, parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else process.parent / parent


def _environment() -> dict[str, str]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}
    return child_environment() | quiet | {"PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}
