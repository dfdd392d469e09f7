"""Prometheus metrics: their names, their labels, and the calls that change them.

Labels that every request uses are looked up once: `metrics.turns("stop", "none")` returns a counter from a
cache. What is in flight is a plain number, which is reported by each `tick` and before each page.

Inside vLLM with `--api-server-count N` each process writes its own values, and vLLM's page merges them: it
adds up counters, histograms and the gauges of what is in progress (`livesum`). Each process has its own view
of a replica's state, so the page shows 1 if any process has that view (`livemax`). The workers of `tokenproxy
serve --workers N` do the same (`tokenproxy.app.worker`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import cache, partial
from time import perf_counter
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Histogram buckets for the proxy, the store and the event loop: milliseconds."""
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Histogram buckets for engines: up to minutes."""


class ReplicaState(StrEnum):
    """The state of a replica as the proxy sees it."""

    STARTING = "starting"
    """It was not reached yet, or discovery of its capabilities has not finished."""
    READY = "ready"
    """It gets requests."""
    DRAINING = "draining"
    """It completes its running requests and gets no new ones."""
    DIFFERENT = "different"
    """It responds, and gets no requests, because its model or rendering is not that of the fleet."""
    STALE = "stale"
    """It responds, and gets no requests, because its weights are not those of the fleet."""
    EJECTED = "ejected"
    """It gets no requests for a while, because of its errors."""
    DOWN = "down"
    """It does not respond."""


class Ids(StrEnum):
    """Where the ids of a prompt come from: the label `kind`."""

    REUSED = "reused"
    """Recorded by the proxy and sent to the engine again."""
    APPENDED = "appended"
    """Added by the chat template after reused or given ids."""
    GIVEN = "given"
    """Sent by the client."""
    RENDERED = "rendered"
    """Rendered by the engine, counted when the turn is recorded."""


class RouteMetrics:
    """The metrics of one route, their labels looked up."""

    def __init__(self, metrics: "Metrics", route: str) -> None:
        self.added = metrics.added.labels(route)
        self.first_byte = metrics.first_byte.labels(route)
        self.duration = metrics.duration.labels(route)
        self.disconnects = metrics.disconnects.labels(route)


class InFlight:
    """How many of a kind are in flight: a plain number, because each call of a gauge takes a lock.

    Use it in a `with`, or call `dec` in a `finally`.
    """

    __slots__ = ("_count", "_gauge", "_reported")

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._count = self._reported = 0
        gauge.set(0)

    def inc(self) -> None:
        """Count one more."""
        self._count += 1

    def dec(self) -> None:
        """Count one less."""
        self._count -= 1

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *error: object) -> None:
        self._count -= 1

    def report(self) -> None:
        """Set the gauge, if the number changed."""
        if self._count != self._reported:
            self._reported = self._count
            self._gauge.set(self._count)


class Metrics:
    """The metrics of one process. Inside vLLM they are in vLLM's registry, so its /metrics shows them."""

    def __init__(
        self, registry: CollectorRegistry | None = None, shared: CollectorRegistry | None = None
    ) -> None:
        """Create the metrics.

        Args:
            registry: where to register them; None creates a registry.
            shared: the registry with the sums of all processes, if this is one of several.
        """
        self.registry = registry if registry is not None else CollectorRegistry()
        self._shared = shared
        self._add_conversation_metrics()
        self._add_feed_metrics()
        self._add_request_metrics()
        self._add_replica_metrics()
        self._add_process_metrics()

    def _add_conversation_metrics(self) -> None:
        self.prompts = self._counters(
            "prompts", "Prompts of chat requests, by source and by the reason for it.", "source", "reason"
        )
        self.prompt_ids = self._counter("prompt_ids", "Ids of prompts, by how they came to be.", "kind")
        self.reused_ids, self.appended_ids, self.given_ids, self.rendered_ids = (
            self.prompt_ids.labels(kind) for kind in (Ids.REUSED, Ids.APPENDED, Ids.GIVEN, Ids.RENDERED)
        )
        self.sampled_ids = self._counter("sampled_ids", "Sampled ids of recorded turns.")
        self.turns = self._counters(
            "turns", "Recorded turns, by finish reason and by the problem that makes them untrainable.",
            "finish_reason", "problem",
        )  # fmt: skip
        self.turns_after_finish = self._counter(
            "turns_after_finish", "Recorded turns of sessions that were finished before."
        )
        self.breaks = self._counters(
            "broken_turns", "Turns whose engine broke off, by why, and by what became of them.",
            "reason", "result",
        )  # fmt: skip
        self.ambiguous = self._counter(
            "ambiguous_prompts", "Prompts rendered because several recorded turns fit."
        )
        self.audits = self._counter(
            "append_audits", "Appends compared with a rendering of the whole history, by result.", "result"
        )
        self.retries = self._counter("retries", "Repeated requests, by result.", "result")
        self.evicted = self._counter(
            "evicted_rollouts", "Rollouts evicted from the store to keep its limits."
        )
        self.store_errors = self._counter(
            "store_errors", "Times the store did not respond, or a turn could not be recorded."
        )
        self.odd_chunks = self._counter(
            "odd_chunks", "Chunks and whole answers with a field that is not known, which are read slowly."
        )
        self.lost_turns = self._counter(
            "lost_turns", "Turns that were answered and never recorded, by reason.", "reason"
        )

    def _add_feed_metrics(self) -> None:
        self._waiting = self._gauge(
            "feed_waiting_rollouts", "Finished rollouts that a consumer of the feed has not acknowledged.",
            "consumer", multiprocess_mode="livemax",
        )  # fmt: skip
        self._oldest = self._gauge(
            "feed_oldest_seconds", "Seconds since the oldest of these was finished; 0 if there is none.",
            "consumer", multiprocess_mode="livemax",
        )  # fmt: skip
        self._undelivered = self._counter(
            "feed_lost_rollouts", "Finished rollouts evicted before a consumer of the feed acknowledged them."
        )

    def _add_request_metrics(self) -> None:
        self.requests = self._counters("requests", "Requests, by route and status.", "route", "status")
        self.disconnects = self._counter(
            "client_disconnects", "Requests whose client left before the end of the response.", "route"
        )
        self.in_flight = InFlight(self._gauge("requests_in_flight", "Requests that are being served."))
        self.queued = InFlight(
            self._gauge("requests_queued", "Requests that wait in the proxy for a replica.")
        )
        self.queued_for_room = InFlight(
            self._gauge(
                "requests_queued_for_room", "Those whose conversations wait for room in a replica's cache."
            )
        )
        self.queue_time = self._histogram(
            "queue_seconds", "Seconds that requests waited in the proxy for a replica.", _SLOW_S
        )
        self.added = self._histogram(
            "added_seconds",
            "Seconds of a request in which it waited neither for an engine nor for the client.",
            _FAST_S,
            "route",
        )
        self.first_byte = self._histogram(
            "time_to_first_byte_seconds", "Seconds from a request to the first byte of the response's body.",
            _SLOW_S, "route",
        )  # fmt: skip
        self.duration = self._histogram(
            "request_seconds", "Seconds from a request to the end of its response.", _SLOW_S, "route"
        )
        self.of_route = cache(partial(RouteMetrics, self))

    def _add_replica_metrics(self) -> None:
        self._state = self._gauge(
            "replica_state", "1 for the state that a replica is in, 0 for the others.",
            "replica", "state", multiprocess_mode="livemax",
        )  # fmt: skip
        self._load = self._gauge(
            "replica_requests_in_flight", "Requests that were sent to a replica and are not over.", "replica"
        )
        self._replicas: dict[str, InFlight] = {}
        self._admitted = self._gauge(
            "replica_admitted_conversations",
            "Conversations whose ids have room in the cache of a replica, by its proxy's count.", "replica",
        )  # fmt: skip
        self.admin_calls = self._counter(
            "admin_calls", "Calls that were sent to all replicas, by how many of them succeeded.",
            "route", "result",
        )  # fmt: skip
        self._ejections = self._counter(
            "replica_ejections", "Times a replica was taken out of use, by reason.", "replica", "reason"
        )

    def _add_process_metrics(self) -> None:
        self.store_time = self._histogram(
            "store_seconds", "Seconds from a call of the store to its return, waiting included.",
            _FAST_S, "operation",
        )  # fmt: skip
        self.store_calls = InFlight(
            self._gauge("store_calls_in_flight", "Calls of the store that wait or run: its queue.")
        )
        self.event_loop_lag = self._histogram(
            "event_loop_lag_seconds", "Seconds by which the event loop woke up a task too late.", _FAST_S
        )

    def page(self) -> bytes:
        """All metrics in Prometheus' text format: of this process, or the sums of all processes."""
        self.report_in_flight()
        return generate_latest(self._shared or self.registry)

    def report_in_flight(self) -> None:
        """Set the gauges of what is in flight."""
        counts = self.in_flight, self.queued, self.queued_for_room, self.store_calls
        for each in (*counts, *self._replicas.values()):
            each.report()

    @contextmanager
    def queue(self, *, for_room: bool) -> Iterator[None]:
        """Count a request as queued while it waits in the proxy, and observe how long it waited.

        Args:
            for_room: whether it waits for room in a replica's cache.
        """
        began = perf_counter()
        with self.queued, self.queued_for_room if for_room else nullcontext():
            try:
                yield
            finally:
                self.queue_time.observe(perf_counter() - began)

    def tick(self, late_s: float) -> None:
        """Report what is in flight, and by how much a task that slept woke up too late."""
        self.event_loop_lag.observe(late_s)
        self.report_in_flight()

    def replica_state(self, replica: str, state: ReplicaState, conversations: int) -> None:
        """Report the state that a replica is in, and how many conversations have room in its cache."""
        for each in ReplicaState:
            self._state.labels(replica, each).set(1 if each is state else 0)
        self._admitted.labels(replica).set(conversations)

    def replica_removed(self, replica: str) -> None:
        """Drop what was reported of a replica: a fleet whose addresses change must not fill the page."""
        for state in ReplicaState:
            self._state.labels(replica, state).set(0)
        self._replicas.pop(replica, None)
        # where files keep their series, the merged page leaves out a replica that is in no state
        _remove({"replica": replica}, self._state, self._load, self._ejections, self._admitted)

    def replica_ejected(self, replica: str, reason: str) -> None:
        """Count that a replica was taken out of use; `reason` is one of few snake_case words."""
        self._ejections.labels(replica, reason).inc()

    def replica_in_flight(self, replica: str) -> InFlight:
        """The count of a replica's requests: look it up once."""
        if replica not in self._replicas:
            self._replicas[replica] = InFlight(self._load.labels(replica))
        return self._replicas[replica]

    def count_evicted(self, rollouts: int, undelivered: int) -> None:
        """Count evicted rollouts, and those among them that a consumer of the feed has not acknowledged."""
        self.evicted.inc(rollouts)
        self._undelivered.inc(undelivered)

    def consumer_lag(self, consumer: str, waiting: int, oldest_s: float) -> None:
        """Report how many finished rollouts a consumer has not acknowledged, and the age of the oldest."""
        self._waiting.labels(consumer).set(waiting)
        self._oldest.labels(consumer).set(oldest_s)

    def consumer_removed(self, consumer: str) -> None:
        """Drop what was reported of a consumer."""
        self.consumer_lag(consumer, 0, 0.0)
        _remove({"consumer": consumer}, self._waiting, self._oldest)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"tokenproxy_{name}", meaning, labels, registry=self.registry)

    def _counters(self, name: str, meaning: str, *labels: str) -> Callable[..., Counter]:
        """A function from the values of the labels to their counter."""
        return cache(self._counter(name, meaning, *labels).labels)

    def _gauge(
        self,
        name: str,
        meaning: str,
        *labels: str,
        multiprocess_mode: Literal["livesum", "livemax"] = "livesum",
    ) -> Gauge:
        return Gauge(
            f"tokenproxy_{name}",
            meaning,
            labels,
            registry=self.registry,
            multiprocess_mode=multiprocess_mode,
        )

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"tokenproxy_{name}", meaning, labels, registry=self.registry, buckets=buckets)


def _remove(labels: dict[str, str], *metrics: Gauge | Counter) -> None:
    """Remove the series with these labels. The files that several processes share keep theirs."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    for metric in metrics:
        metric.remove_by_labels(labels)
