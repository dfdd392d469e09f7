"""Prometheus counters."""

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """The counters of one process. Inside vLLM they are in vLLM's registry, so its /metrics shows them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: where to register the counters; None creates a registry."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self.prompts = self._counter(
            "prompts", "Prompts of chat requests, by source and by the reason for it.", "source", "reason"
        )
        self.turns = self._counter(
            "turns", "Recorded turns, by finish reason and by the problem that makes them untrainable.",
            "finish_reason", "problem",
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

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"tokenproxy_{name}", meaning, labels, registry=self.registry)
