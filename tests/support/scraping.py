"""Reads a proxy's metrics as Prometheus does: over HTTP, with the official parser."""

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of one page."""

    def __init__(self, client: httpx.Client) -> None:
        page = client.get("/metrics")
        assert page.status_code == 200
        self._samples = [
            sample
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
            if sample.name.startswith("tokenproxy_")
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 if there is none."""
        full = f"tokenproxy_{name}"
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == full and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str) -> list[Mapping[str, Any]]:
        """The labels of the samples of a name."""
        return [sample.labels for sample in self._samples if sample.name == f"tokenproxy_{name}"]


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """By how much a metric grew."""
    return after.value(name, **labels) - before.value(name, **labels)
