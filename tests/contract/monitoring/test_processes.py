"""Metrics of several processes on one page, as vLLM serves them with `--api-server-count`."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

_WRITER = """
import sys
from proxy.metrics import Metrics, ReplicaState
metrics = Metrics()
served = metrics.in_progress()
served.__enter__()
metrics.replica_in_flight("r").inc(2)
metrics.replica_state("r", ReplicaState(sys.argv[1]))
metrics.of_route("/x").count(200)
metrics.of_route("/x").added.observe(0.002)
print("written", flush=True)
sys.stdin.read()
served.__exit__(None, None, None)
metrics.replica_in_flight("r").dec(2)
"""


def test_two_processes(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tokenproxy_{name}", labels)

    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, state],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for state in ("ready", "down")
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        assert (value("requests_in_flight"), value("replica_requests_in_flight", replica="r")) == (2, 4)
        assert value("requests_total", route="/x", status="200") == 2
        assert value("added_seconds_count", route="/x") == 2
        # each has its own view, and none is lost; there is no label of a process
        states = [value("replica_state", replica="r", state=state) for state in ("ready", "down", "starting")]
        assert states == [1, 1, 0]
        for writer in writers:
            writer.communicate(timeout=30)
        assert (value("requests_in_flight"), value("replica_requests_in_flight", replica="r")) == (0, 0)
        assert value("requests_total", route="/x", status="200") == 2
    finally:
        for writer in writers:
            writer.kill()
