"""Metrics of several workers on one page.

Each worker writes its values to files of prometheus_client's multi-process mode, and any worker reads the
files of all. The files are named by the worker's number instead of its process id: a worker that is started
again continues the counters of the one before, so sums never fall, and the number of files stays constant.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from tokenproxy.monitoring.metrics import Metrics

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client that names the folder of the files."""
_STATE = "tokenproxy_replica_state"
_OLDEST = "process_start_time_seconds"


def shared_metrics(worker: int, folder: Path) -> Metrics:
    """Create the metrics of a worker, whose page shows the sums of all workers.

    The environment variable must name the folder, and no other metrics may exist in this process.
    """
    # prometheus_client reads this name for each metric that it creates
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
    merged = CollectorRegistry()
    merged.register(_MergedMetrics(folder))
    merged.register(_Processes(folder))
    return Metrics(shared=merged)


def add_process(folder: Path, name: str, pid: int) -> None:
    """Add a process to the sums of `process_...`; it replaces the earlier one of the same name."""
    (folder / f"{name}.pid").write_text(str(pid))


def worker_ended(folder: Path, worker: int) -> None:
    """Forget what a worker had in progress. Its counters stay in the sums."""
    (folder / f"{worker}.pid").unlink(missing_ok=True)
    mark_process_dead(worker, str(folder))  # type: ignore[no-untyped-call]


class _MergedMetrics(Collector):
    """The sums of all workers, without replicas that were removed from the fleet."""

    def __init__(self, folder: Path) -> None:
        self._files = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Read the files."""
        metrics: list[Metric] = list(self._files.collect())  # type: ignore[no-untyped-call]
        states = [sample for metric in metrics if metric.name == _STATE for sample in metric.samples]
        present = {sample.labels["replica"] for sample in states if sample.value}
        gone = {sample.labels["replica"] for sample in states} - present
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if sample.labels.get("replica") not in gone]
            yield metric


class _Processes(Collector):
    """The sums of `process_...` over the workers and their parent; the start is that of the oldest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Read them from the operating system."""
        sums: dict[str, Metric] = {}
        for file in self._folder.glob("*.pid"):
            for metric in _of_process(file):
                first = sums.setdefault(metric.name, metric)
                if first is not metric:
                    ours, theirs = first.samples[0], metric.samples[0]
                    combine = min if metric.name == _OLDEST else sum
                    first.samples[0] = ours._replace(value=combine((ours.value, theirs.value)))
        return sums.values()


def _of_process(file: Path) -> list[Metric]:
    try:
        pid = int(file.read_text())
    except (OSError, ValueError):  # the process has just ended or started
        return []
    return list(ProcessCollector(pid=lambda: pid, registry=None).collect())


def metrics_environment(folder: Path) -> dict[str, str]:
    """The environment of a worker: that of this process, with the folder of the metrics."""
    return {**os.environ, FOLDER_VARIABLE: str(folder)}
