"""The metrics of a replica of the proxy among those that Ray exports.

Ray Serve sends a request for `/metrics` to one replica, which knows only its own values. So each replica
passes its values to Ray, whose agent on each node shows those of all its processes, as `ray_tokenproxy_...`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from ray.util.metrics import Counter, Gauge

log = logging.getLogger("tokenproxy")

_PREFIX = "tokenproxy_"
_EVERY_S = 5.0
_Labels = tuple[tuple[str, str], ...]


class RayMetrics:
    """Passes the values of one registry to Ray."""

    def __init__(self, registry: Collector | CollectorRegistry) -> None:
        self._registry = registry
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._passed: dict[tuple[str, _Labels], float] = {}

    def update(self) -> None:
        """Pass what changed.

        Ray adds `_total` to the names of counters and cannot take buckets as they are, so the samples of a
        histogram are passed as gauges: their names stay, and `rate` and `histogram_quantile` need no more.
        """
        for family in self._registry.collect():
            if not family.name.startswith(_PREFIX):
                continue
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                if sample.name.endswith("_created"):
                    continue
                if family.type == "counter":
                    self._count(sample.name, family.documentation, labels, sample.value)
                else:
                    self._set(sample.name, family.documentation, labels, sample.value)

    def _set(self, name: str, text: str, labels: _Labels, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, text, tuple(key for key, _ in labels))
        gauge.set(value, tags=dict(labels))

    def _count(self, name: str, text: str, labels: _Labels, value: float) -> None:
        growth = value - self._passed.get((name, labels), 0.0)
        if growth <= 0:
            return
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Counter(name, text, tuple(key for key, _ in labels))
        counter.inc(growth, tags=dict(labels))
        self._passed[name, labels] = value


@asynccontextmanager
async def exported(registry: Collector | CollectorRegistry) -> AsyncIterator[None]:
    """Pass the values of a registry to Ray again and again, and once more at the end."""
    metrics = RayMetrics(registry)
    task = asyncio.create_task(_export(metrics))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        metrics.update()


async def _export(metrics: RayMetrics) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            metrics.update()
        except Exception:  # the boundary of the task: metrics must not stop because of one
            log.exception("the metrics could not be passed to Ray")
