"""The goals of `gateway.py`: what is compared with what, and the least or most that is aimed at."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.gateway_compare import OURS, Compared, Timed, recorded
from benchmarks.gateway_conversations import RESTARTED, WHOLE, Conversations
from benchmarks.gateway_loads import (
    FEW_GIVEN_IDS,
    FIRST_TURN,
    GIVEN_IDS,
    LONG_ANSWER,
    LONG_BOTH,
    MESSAGES_STREAM,
    RECOGNISED,
    RESPONSES_STREAM,
    SMALL_CHAT,
    STREAM,
)

ROUTER, RLLM = "vllm-router 0.1.17", "rllm-model-gateway 0.1.0"
_RATIOS = (
    (SMALL_CHAT, ROUTER, 0.25),
    (FIRST_TURN, ROUTER, 0.3),
    (LONG_ANSWER, ROUTER, 0.3),
    (RECOGNISED, ROUTER, 0.35),
    (STREAM, ROUTER, 0.7),
    (GIVEN_IDS, ROUTER, 10.0),
    *((column, RLLM, 20.0) for column in (SMALL_CHAT, FIRST_TURN, LONG_ANSWER, LONG_BOTH, STREAM)),
)
"""Least ratio of tokenproxy's rate to that of another gateway, by column."""
_GROWTH = ((WHOLE, 1.5), (RESTARTED, 4.0))
"""Most ratio of the added p50 at 128k ids to that at 1k, by state."""
_ADDED_MS, _WRITTEN_KB = 0.2, 100.0
_TRANSLATED = 2.0
"""Most ratio of the added p50 of a translated stream to that of the chat route's."""


@dataclass(slots=True)
class Results:
    """Everything that was measured."""

    compared: Compared = field(default_factory=Compared)
    requests: dict[str, Timed] = field(default_factory=dict)
    """tokenproxy's own requests, by name."""
    conversations: Conversations = field(default_factory=lambda: Conversations([]))

    def ratio(self, column: str, row: str) -> float | None:
        """tokenproxy's rate / that of a row; None if one of them was not measured."""
        ours, theirs = (self.compared.cells.get((column, name)) for name in (OURS, row))
        if ours is None or theirs is None or not ours.samples or not theirs.samples:
            return None
        return ours.median("per_second") / theirs.median("per_second")

    def growth(self, store: str, state: str) -> float | None:
        """Added p50 after 128k ids / after 1k; None if one of them was not measured."""
        timed = self.conversations.timed
        short, long = (timed.get((store, state, length)) for length in ("1k", "128k"))
        if short is None or long is None or not short.added.proxy_ms or not long.added.proxy_ms:
            return None
        return long.added.ms() / short.added.ms()


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal, and what was measured."""

    name: str
    measured: float | None
    """None if it was not measured."""
    bound: float
    unit: str
    least: bool
    """Whether the bound is the least or the most that meets the goal."""

    @property
    def met(self) -> bool | None:
        """Whether it is met; None if it was not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.least else self.measured <= self.bound


def goals(results: Results) -> list[Goal]:
    """All goals."""
    return [*_of_rates(results), *_of_growth(results), *_of_requests(results)]


def _of_rates(results: Results) -> Iterator[Goal]:
    for column, row, bound in _RATIOS:
        yield Goal(f"{column}: rate / that of {row}", results.ratio(column, row), bound, "x", least=True)


def _of_growth(results: Results) -> Iterator[Goal]:
    for store in ("SQLite", "Redis", "memory"):
        for state, bound in _GROWTH if store != "memory" else _GROWTH[:1]:
            name = f"recognised turn, {store}, {state}: added p50 at 128k ids / at 1k"
            yield Goal(name, results.growth(store, state), bound, "x", least=False)


def _of_requests(results: Results) -> Iterator[Goal]:
    chat, route = (
        results.requests.get(name) for name in (recorded(SMALL_CHAT), recorded(FEW_GIVEN_IDS, False))
    )
    more = None
    if chat is not None and route is not None and chat.added.proxy_ms and route.added.proxy_ms:
        more = chat.added.ms() - route.added.ms()
    yield Goal(
        f"{SMALL_CHAT}, recorded: added p50 - that of {FEW_GIVEN_IDS}, not recorded",
        more,
        _ADDED_MS,
        " ms",
        least=False,
    )
    for stream in (MESSAGES_STREAM, RESPONSES_STREAM):
        name = f"{stream}: added p50 / that of {recorded(STREAM)}"
        yield Goal(name, _added_ratio(results, stream, STREAM), _TRANSLATED, "x", least=False)
    first = results.compared.cells.get((FIRST_TURN, OURS))
    written = first.median("written_kb") if first is not None and first.samples else None
    yield Goal(f"{FIRST_TURN}: written per turn", written, _WRITTEN_KB, " KB", least=False)


def _added_ratio(results: Results, column: str, other: str) -> float | None:
    """Ratio of the added p50 of two of tokenproxy's own requests; None if one of them was not measured."""
    timed, by = (results.requests.get(recorded(name)) for name in (column, other))
    if timed is None or by is None or not timed.added.proxy_ms or not by.added.proxy_ms:
        return None
    return timed.added.ms() / by.added.ms()
