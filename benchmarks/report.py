"""Results of the benchmarks, as tables and as JSON."""

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.clocked import INSIDE, REQUEST, STAGES, Span
from benchmarks.load import LoadResult

LIBRARIES = ("uvicorn", "uvloop", "httptools", "fastapi", "starlette", "msgspec")

QUIET = 0.05
"""Share of the proxy's core that other programs may use before a warning is printed."""


@dataclass(slots=True)
class Rate:
    """Throughput under load, over all rounds."""

    requests: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of the proxy's process meanwhile."""
    other_programs_s: float = 0.0
    """CPU seconds of other programs on the proxy's core meanwhile."""
    rounds: list[float] = field(default_factory=list)
    """Requests per second in each round."""
    p99_ms: list[float] = field(default_factory=list)
    """99th percentile of the latencies in each round."""

    def add(self, answered: LoadResult, cpu_s: float, other_programs_s: float) -> None:
        """Add a round."""
        self.requests += answered.requests
        self.seconds += answered.seconds
        self.cpu_s += cpu_s
        self.other_programs_s += other_programs_s
        self.rounds.append(answered.requests / answered.seconds)
        self.p99_ms.append(answered.p99_ms)

    @property
    def per_second(self) -> float:
        """The median round."""
        return median(self.rounds)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per request."""
        return 1000 * self.cpu_s / self.requests


@dataclass(slots=True)
class Result:
    """All rounds of one case."""

    case: Case
    direct_ms: list[float] = field(default_factory=list)
    proxy_ms: list[float] = field(default_factory=list)
    direct: Rate = field(default_factory=Rate)
    proxy: Rate = field(default_factory=Rate)

    @property
    def added_ms(self) -> float:
        """Median through the proxy minus median without it."""
        return median(self.proxy_ms) - median(self.direct_ms)

    @property
    def met(self) -> dict[str, bool]:
        """For each aim of the case, whether it is met."""
        met = {}
        if self.case.added_ms is not None:
            met["added_p50"] = self.added_ms <= self.case.added_ms
        if self.case.per_second is not None:
            met["per_second"] = self.proxy.per_second >= self.case.per_second
        return met


def machine(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Machine and library versions, on which the numbers depend."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version(name)}" for name in libraries),
    }


def machine_lines(about: dict[str, str], note: str = "") -> list[str]:
    """The first lines of a report: the cores, with a note after them, and the versions."""
    return [
        f"{about['cores']} cores of {about['cpu']}{note}",
        f"Python {about['python']}, {about['libraries']}",
    ]


def disturbance(others: float, cores: str) -> str:
    """A warning after a report, if other programs used more than QUIET of the cores; else an empty text."""
    if others <= QUIET:
        return ""
    return f"\n\nOther programs used {others:.0%} of {cores}: measure again on an idle machine."


def overhead_json(results: Sequence[Result], about: dict[str, str]) -> dict[str, Any]:
    """Everything, for another program."""
    return {"machine": about, "cases": [_case(result) for result in results]}


def overhead_text(results: Sequence[Result], about: dict[str, str]) -> str:
    """The results as two Markdown tables, aligned for a terminal."""
    others = sum(result.proxy.other_programs_s for result in results) / sum(r.proxy.seconds for r in results)
    disturbed = f"While the proxy was under load, other programs used {others:.0%} of its core"
    disturbed += ": measure again on an idle machine." if others > QUIET else "."
    latency = [
        ["added latency", "direct p50", "proxy p50", "added p50", "aim", ""],
        *(_latency_row(result) for result in results if result.proxy_ms),
    ]
    load = [
        [
            "on one core",
            "connections",
            "p99",
            "direct/s",
            "proxy/s",
            "ratio",
            "core",
            "CPU ms",
            "1000/CPU",
            "aim",
            "",
        ],
        *(_load_row(result) for result in results),
    ]
    return "\n".join([*machine_lines(about), "", table(latency), "", table(load), "", disturbed])


def _latency_row(result: Result) -> list[str]:
    aim = result.case.added_ms
    return [
        result.case.name,
        f"{median(result.direct_ms):.2f} ms",
        f"{median(result.proxy_ms):.2f} ms",
        f"{result.added_ms:.2f} ms",
        f"<= {aim:g} ms" if aim is not None else "-",
        verdict(result.met.get("added_p50")),
    ]


def _load_row(result: Result) -> list[str]:
    rate, aim = result.proxy, result.case.per_second
    return [
        result.case.name,
        str(result.case.connections),
        f"{median(rate.p99_ms):.1f} ms",
        f"{result.direct.per_second:,.0f}",
        f"{rate.per_second:,.0f}",
        f"{rate.per_second / result.direct.per_second:.2f}",
        f"{rate.cpu_s / rate.seconds:.0%}",
        f"{rate.cpu_ms:.3f}",
        f"{1000 / rate.cpu_ms:,.0f}" if rate.cpu_s else "-",
        f">= {aim:,.0f}" if aim is not None else "-",
        verdict(result.met.get("per_second")),
    ]


def verdict(met: bool | None) -> str:
    """A table's cell for an aim; empty if there is none."""
    return "" if met is None else "met" if met else "MISSED"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for a terminal. The first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join([first, *rest]) + " |")
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _case(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "name": case.name,
        "aims": {"added_p50_ms": case.added_ms, "per_second": case.per_second},
        "met": result.met,
        "direct_p50_ms": median(result.direct_ms) if result.direct_ms else None,
        "proxy_p50_ms": median(result.proxy_ms) if result.proxy_ms else None,
        "added_p50_ms": result.added_ms if result.proxy_ms else None,
        "cpu_ms_per_request": result.proxy.cpu_ms,
        "connections": case.connections,
        "direct": {"per_second": result.direct.per_second, **asdict(result.direct)},
        "proxy": {"per_second": result.proxy.per_second, **asdict(result.proxy)},
    }


SAME, ELSEWHERE, RESTARTED = "", "other process", "restarted"
"""The process that recorded the turn before: the measured one, another one, or one that has ended."""
FLAT = 3.0
"""Aim: the maximum of time added to the longest conversation / time added to the shortest."""
_REST, _PROXY = "the rest", "proxy, total"

ByLength = defaultdict[int, list[float]]


@dataclass(slots=True)
class Times:
    """The turns that were timed with one store and one state of the process, by conversation length."""

    store: str
    state: str
    direct_ms: ByLength = field(default_factory=lambda: defaultdict(list))
    proxy_ms: ByLength = field(default_factory=lambda: defaultdict(list))
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Lengths of the prompts."""
    windows: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Start and end of each request, in nanoseconds of CLOCK_MONOTONIC."""
    stages: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Milliseconds of each stage of each request."""

    @property
    def name(self) -> str:
        """The row's name in the tables."""
        return f"{self.store}, {self.state}" if self.state else self.store

    def added(self, length: int, share: float = 0.5) -> float:
        """Milliseconds that the proxy adds: its percentile minus the direct median."""
        return percentile(self.proxy_ms[length], share) - median(self.direct_ms[length])

    def stage(self, name: str, length: int) -> float:
        """The median of a stage in milliseconds; 0 if it never ran."""
        return median(self.stages[length].get(name) or [0.0])

    def add_stages(self, requests: Sequence[Sequence[Span]]) -> None:
        """Find the stages of the timed requests among the spans of all requests."""
        spans_by_start = {}
        for spans in requests:
            spans_by_start.update({start: spans for name, start, _ in spans if name == REQUEST})
        starts = sorted(spans_by_start)
        for length, windows in self.windows.items():
            found: dict[str, list[float]] = defaultdict(list)
            for begin, end in windows:
                spans = next(spans_by_start[start] for start in starts if begin <= start <= end)
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
    """All results."""

    lengths: list[int]
    rows: list[Times] = field(default_factory=list)
    render: ByLength = field(default_factory=lambda: defaultdict(list))
    """Milliseconds of rendering the whole conversation."""
    others: float = 0.0
    """Share of the proxies' core that other programs used."""

    def growth(self, times: Times) -> float:
        """Time added to the longest conversation / time added to the shortest."""
        return times.added(self.lengths[-1]) / times.added(self.lengths[0])

    def gain(self, times: Times, length: int) -> float:
        """Time of a rendering / time added by the proxy."""
        return median(self.render[length]) / times.added(length)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is: 0.5 for the median."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def turns_json(measured: Measured, about: dict[str, str]) -> dict[str, Any]:
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
                "state": times.state or "same process",
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


def turns_text(measured: Measured, about: dict[str, str]) -> str:
    """The results as Markdown tables, aligned for a terminal."""
    short, long = _label(measured.lengths[0]), _label(measured.lengths[-1])
    tokens = ", ".join(f"{median(measured.rows[0].tokens[length]):,.0f}" for length in measured.lengths)
    head = [
        *machine_lines(about, f"; other programs used {about['others']} of the proxy's"),
        f"prompts of {tokens} ids",
    ]
    titles = [f"{quantile} {_label(length)}" for length in measured.lengths for quantile in ("p50", "p99")]
    gain = f"render / added, {long}"
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
    """The stages with one store: by length, and for the longest also from the other states of the process."""
    same, *cold = [times for times in measured.rows if times.store == store]
    lengths, last = measured.lengths, measured.lengths[-1]
    head = [f"{store}: stage, p50 in ms", *map(_label, lengths)]
    rows = [head + [f"{_label(last)}, {times.state}" for times in cold]]
    for name in (*STAGES, _REST, _PROXY, *INSIDE):
        values = [same.stage(name, length) for length in lengths] + [
            times.stage(name, last) for times in cold
        ]
        if any(values):
            rows.append([name, *(f"{value:.2f}" for value in values)])
    return table(rows)


def _label(length: int) -> str:
    return f"{length // 1000}k"
