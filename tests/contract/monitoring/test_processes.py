"""Metrics of several processes on one page, as vLLM serves them with `--api-server-count`."""

import os
import subprocess
import sys
from pathlib import Path

_WRITER = """
import sys
from proxy.metrics import Metrics, ReplicaState
metrics = Metrics()
served = metrics.in_progress()
served.__enter__()
metrics.replica_in_flight("in-process").inc(2)
metrics.replica_state("in-process", ReplicaState(sys.argv[1]))
metrics.of_route("/x").count(200)
metrics.of_route("/x").added.observe(0.002)
with metrics.queue():
    pass
print("written", flush=True)
sys.stdin.read()
served.__exit__(None, None, None)
metrics.replica_in_flight("in-process").dec(2)
"""
_READER = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def _page(environment: dict[str, str]) -> dict[str, float]:
    """The samples of the page that merges all processes."""
    page = subprocess.run(
        [sys.executable, "-c", _READER], env=environment, capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_two_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, state],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for state in ("ready", "down")
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        page = _page(environment)
        assert page["tokenproxy_requests_in_flight"] == 2
        assert page['tokenproxy_replica_requests_in_flight{replica="in-process"}'] == 4
        assert page['tokenproxy_requests_total{route="/x",status="200"}'] == 2
        assert page['tokenproxy_added_seconds_count{route="/x"}'] == 2
        assert page["tokenproxy_requests_queued"] == 0
        # each has its own view, and none is lost; there is no label of a process
        states = {state: page[f'tokenproxy_replica_state{{replica="in-process",state="{state}"}}']
                  for state in ("ready", "down", "starting")}  # fmt: skip
        assert states == {"ready": 1, "down": 1, "starting": 0}
        for writer in writers:
            writer.communicate(timeout=30)
        page = _page(environment)
        assert page["tokenproxy_requests_in_flight"] == 0
        assert page['tokenproxy_replica_requests_in_flight{replica="in-process"}'] == 0
        assert page['tokenproxy_requests_total{route="/x",status="200"}'] == 2
    finally:
        for writer in writers:
            writer.kill()
