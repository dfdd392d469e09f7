"""What is counted, in Prometheus' terms."""

from prometheus_client import CollectorRegistry, Counter


class Metrics:
    """The counters of one process. Inside vLLM they stand in vLLM's registry and show at its /metrics."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry` None makes one of its own."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self.prompts = self._counter(
            "prompts", "Prompts of chat requests, by where they came from and why.", "source", "reason"
        )
        self.turns = self._counter(
            "turns", "Turns recorded, by how they ended and what keeps them from being trained on.",
            "finish_reason", "problem",
        )  # fmt: skip
        self.ambiguous = self._counter("ambiguous_prompts", "Prompts where recency chose among equal texts.")
        self.retries = self._counter("retries", "Repeated requests, by what became of them.", "result")
        self.evicted = self._counter("evicted_rollouts", "Rollouts that left the store to keep its limits.")
        self.store_errors = self._counter(
            "store_errors", "Times the store did not answer, or a turn was not recorded."
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"tokenproxy_{name}", meaning, labels, registry=self.registry)
