"""A snapshot of a running proxy, read from `/ready`, `/metrics` and `/v1/sessions`."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TIMEOUT_S = 5.0
SESSIONS = 10
"""Number of sessions to show: the most recently used ones."""


class Unreachable(Exception):
    """The server does not respond, or is not a tokenproxy; the message names what to check."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a proxy."""

    at: float
    """Time of the snapshot, on the clock of `time.monotonic`."""
    engines: list[dict[str, Any]]
    """The replicas, as `/ready` reports them."""
    sessions: list[dict[str, Any]]
    """The most recently used sessions, as `/v1/sessions` lists them."""
    sessions_problem: str = ""
    """The reason why there is no list of sessions; empty if there is one."""
    samples: Mapping[str, list[Sample]] = field(default_factory=dict)
    """The proxy's metrics by the name of the sample, without `tokenproxy_`."""

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 if there is none."""
        found = self.samples.get(name, ())
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name, added up for each value of a label."""
        sums: dict[str, float] = {}
        for sample in self.samples.get(name, ()):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def state_of(self, replica: str) -> str:
        """The state of a replica; empty if the proxy reports none."""
        samples = self.samples.get("replica_state", ())
        return next((s.labels["state"] for s in samples if s.labels["replica"] == replica and s.value), "")


def quantile(now: Snapshot, before: Snapshot | None, name: str, share: float) -> float | None:
    """The value of a histogram that `share` of the observations since `before` do not exceed.

    Interpolated within its bucket, as Prometheus' `histogram_quantile` does. None without observations.
    """
    counts: dict[float, float] = {}
    for le, count in now.by(f"{name}_bucket", "le").items():
        counts[float(le)] = count - (before.value(f"{name}_bucket", le=le) if before else 0.0)
    edges = sorted(counts)
    if not edges or counts[edges[-1]] <= 0:
        return None
    rank, lower, below = share * counts[edges[-1]], 0.0, 0.0
    for edge in edges:
        if counts[edge] >= rank:
            if edge == float("inf"):
                return lower
            inside = counts[edge] - below
            return lower + (edge - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = edge, counts[edge]
    return lower


async def take(client: httpx.AsyncClient, url: str) -> Snapshot:
    """Take a snapshot of a proxy.

    Raises:
        Unreachable: it does not respond, or is not a tokenproxy.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            ready, metrics, sessions = await asyncio.gather(
                _get(client, f"{url}/ready"),
                _get(client, f"{url}/metrics"),
                _get(client, f"{url}/v1/sessions?limit={SESSIONS}"),
            )
    except TimeoutError as error:
        raise Unreachable(f"{url} did not respond within {TIMEOUT_S:g} s") from error
    except httpx.HTTPError as error:
        raise Unreachable(f"nothing responds at {url}: {error}") from error
    try:
        state = msgspec.json.decode(ready[1], type=dict[str, Any])
        # without a key with the scope `read`, a proxy with keys reports only whether it is ready
        engines = state.get("engines", []) if isinstance(state["ready"], bool) else []
        samples = _samples(metrics[1].decode())
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise Unreachable(
            f"{url} is not a tokenproxy: GET /ready returned {ready[0]}: is the port right?"
        ) from error
    listed, problem = _sessions(*sessions)
    return Snapshot(time.monotonic(), engines, listed, problem, samples)


async def _get(client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
    response = await client.get(url)
    return response.status_code, response.content


def _samples(page: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("tokenproxy_"):
                found.setdefault(sample.name.removeprefix("tokenproxy_"), []).append(sample)
    return found


def _sessions(status: int, body: bytes) -> tuple[list[dict[str, Any]], str]:
    if status == 401:
        return [], "the list of sessions needs a key: pass --api-key KEY"
    try:
        listed = msgspec.json.decode(body, type=dict[str, Any])["data"]
    except (msgspec.DecodeError, KeyError):
        return [], f"GET /v1/sessions returned {status}"
    return list(listed), ""
