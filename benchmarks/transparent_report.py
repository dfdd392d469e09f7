"""What keeping conversations exact adds to a turn, as tables and as JSON."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.clocked import ANSWER, INSIDE, STAGES, Span
from benchmarks.report import table, verdict

WARM, ELSEWHERE, RESTARTED = "", "other process", "restarted"
"""What the process that is asked knows of the conversation."""
FLAT = 3.0
"""Aim: added after the longest conversation over added after the shortest."""
_REST, _PROXY = "the rest", "proxy in all"

ByLength = defaultdict[int, list[float]]


@dataclass(slots=True)
class Times:
    """The turns that were timed with one store, from one state of the process, by length."""

    store: str
    state: str
    direct_ms: ByLength = field(default_factory=lambda: defaultdict(list))
    proxy_ms: ByLength = field(default_factory=lambda: defaultdict(list))
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of the prompts."""
    windows: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """When each request began and ended: nanoseconds of CLOCK_MONOTONIC."""
    stages: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Milliseconds of each stage of each request."""

    @property
    def name(self) -> str:
        """As the tables have it."""
        return f"{self.store}, {self.state}" if self.state else self.store

    def added(self, length: int, share: float = 0.5) -> float:
        """What the proxy adds, in milliseconds: its percentile minus the direct median."""
        return percentile(self.proxy_ms[length], share) - median(self.direct_ms[length])

    def stage(self, name: str, length: int) -> float:
        """The median of a stage, in milliseconds; 0 if it never came to it."""
        return median(self.stages[length].get(name) or [0.0])

    def add_stages(self, requests: Sequence[Sequence[Span]]) -> None:
        """Take the stages of the requests that were timed out of what the clocks said."""
        answers = {}
        for spans in requests:
            answers.update({start: spans for name, start, _ in spans if name == ANSWER})
        starts = sorted(answers)
        for length, windows in self.windows.items():
            found: dict[str, list[float]] = defaultdict(list)
            for begin, end in windows:
                spans = next(answers[start] for start in starts if begin <= start <= end)
                taken = dict.fromkeys((*STAGES, *INSIDE), 0.0)
                for name, start, stop in spans:
                    if name in taken and begin <= start and stop <= end:
                        taken[name] += (stop - start) / 1e6
                taken[_PROXY] = (end - begin) / 1e6
                taken[_REST] = taken[_PROXY] - sum(taken[name] for name in STAGES)
                for name, ms in taken.items():
                    found[name].append(ms)
            self.stages[length] = dict(found)


@dataclass(slots=True)
class Measured:
    """Everything that was measured."""

    lengths: list[int]
    rows: list[Times] = field(default_factory=list)
    render: ByLength = field(default_factory=lambda: defaultdict(list))
    """Milliseconds of rendering the whole conversation."""
    others: float = 0.0
    """Share of the proxies' core that other programs had."""

    def growth(self, times: Times) -> float:
        """How many times as much is added after the longest conversation as after the shortest."""
        return times.added(self.lengths[-1]) / times.added(self.lengths[0])

    def gain(self, times: Times, length: int) -> float:
        """How many times as long as what is added a rendering takes."""
        return median(self.render[length]) / times.added(length)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that is exceeded by the rest of them."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def as_json(measured: Measured, about: dict[str, str]) -> dict[str, Any]:
    """Everything, for another program."""
    lengths = measured.lengths
    return {
        "machine": about,
        "lengths": lengths,
        "aims": {"growth": FLAT},
        "render_ms": measured.render,
        "rows": [
            {
                "store": times.store,
                "state": times.state or "warm",
                "tokens": {length: median(times.tokens[length]) for length in lengths},
                "added_p50_ms": {length: times.added(length) for length in lengths},
                "added_p99_ms": {length: times.added(length, 0.99) for length in lengths},
                "growth": measured.growth(times),
                "met": measured.growth(times) <= FLAT,
                "gain": {length: measured.gain(times, length) for length in lengths},
                "samples": {
                    "direct_ms": times.direct_ms,
                    "proxy_ms": times.proxy_ms,
                    "stages_ms": times.stages,
                },
            }
            for times in measured.rows
        ],
    }


def as_text(measured: Measured, about: dict[str, str]) -> str:
    """Markdown tables that also read well on a terminal."""
    short, long = _label(measured.lengths[0]), _label(measured.lengths[-1])
    tokens = ", ".join(f"{median(measured.rows[0].tokens[length]):,.0f}" for length in measured.lengths)
    head = [
        f"{about['cores']} cores of {about['cpu']}; other programs had {about['others']} of the proxy's",
        f"Python {about['python']}, {about['libraries']}",
        f"prompts of {tokens} ids",
    ]
    titles = [f"{quantile} {_label(length)}" for length in measured.lengths for quantile in ("p50", "p99")]
    gain = f"render / it, {long}"
    added = [
        ["ms added to a turn", *titles, f"{long} / {short}", f"<= {FLAT:g}x", gain],
        *(_row(times, measured) for times in measured.rows),
        _render_row(measured),
    ]
    parts = ["\n".join(head), table(added)]
    parts += [_stages(store, measured) for store in dict.fromkeys(row.store for row in measured.rows)]
    return "\n\n".join(parts)


def _row(times: Times, measured: Measured) -> list[str]:
    cells = [f"{times.added(length, share):.2f}" for length in measured.lengths for share in (0.5, 0.99)]
    growth = measured.growth(times)
    gain = measured.gain(times, measured.lengths[-1])
    return [times.name, *cells, f"{growth:.1f}x", verdict(growth <= FLAT), f"{gain:.1f}x"]


def _render_row(measured: Measured) -> list[str]:
    render = [measured.render[length] for length in measured.lengths]
    cells = [f"{percentile(ms, share):.2f}" for ms in render for share in (0.5, 0.99)]
    return ["render", *cells, f"{median(render[-1]) / median(render[0]):.0f}x", "", ""]


def _stages(store: str, measured: Measured) -> str:
    """The stages with one store: as they grow, and after the longest where less is known."""
    warm, *cold = [times for times in measured.rows if times.store == store]
    lengths, last = measured.lengths, measured.lengths[-1]
    head = [f"{store}: stage, p50 in ms", *map(_label, lengths)]
    rows = [head + [f"{_label(last)}, {times.state}" for times in cold]]
    for name in (*STAGES, _REST, _PROXY, *INSIDE):
        values = [warm.stage(name, length) for length in lengths] + [
            times.stage(name, last) for times in cold
        ]
        if any(values):
            rows.append([name, *(f"{value:.2f}" for value in values)])
    return table(rows)


def _label(length: int) -> str:
    return f"{length // 1000}k"
