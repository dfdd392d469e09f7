"""Replicas on sockets, and what the metrics say about them."""

from collections.abc import Callable

import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.scraping import Scrape

Start = Callable[..., FakeVllm]
"""Starts a fake engine."""


def state_of(client: httpx.Client, engine: FakeVllm) -> str:
    """The state of a replica by the metrics; nothing if they do not name it."""
    scrape = Scrape(client)
    states = [labels["state"] for labels in scrape.labels("replica_state")]
    value = {state: scrape.value("replica_state", replica=engine.url, state=state) for state in states}
    return next((state for state in states if value[state]), "")
