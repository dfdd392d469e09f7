"""What was measured, as tables and as JSON."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.load import Answered

_LIBRARIES = ("uvicorn", "uvloop", "httptools", "fastapi", "starlette", "aiohttp", "msgspec")

QUIET = 0.05
"""Share of the proxy's core that other programs may have before the numbers are doubtful."""


@dataclass(slots=True)
class Rate:
    """Requests answered under load."""

    requests: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """What the proxy's process used meanwhile."""
    others_s: float = 0.0
    """What other programs used of the proxy's core meanwhile."""
    rounds: list[float] = field(default_factory=list)
    """Requests a second of each round."""
    p99_ms: list[float] = field(default_factory=list)
    """What the slowest hundredth of the requests waited, in each round."""

    def add(self, answered: Answered, cpu_s: float, others_s: float) -> None:
        """One more round."""
        self.requests += answered.requests
        self.seconds += answered.seconds
        self.cpu_s += cpu_s
        self.others_s += others_s
        self.rounds.append(answered.requests / answered.seconds)
        self.p99_ms.append(answered.p99_ms)

    @property
    def per_second(self) -> float:
        """The median round."""
        return median(self.rounds)

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU for each request."""
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
        """Which aims are met, of those that the case has."""
        met = {}
        if self.case.added_ms is not None:
            met["added_p50"] = self.added_ms <= self.case.added_ms
        if self.case.per_second is not None:
            met["per_second"] = self.proxy.per_second >= self.case.per_second
        return met


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
    }


def as_json(results: Sequence[Result], about: dict[str, str]) -> dict[str, Any]:
    """Everything, for another program."""
    return {"machine": about, "cases": [_case(result) for result in results]}


def as_text(results: Sequence[Result], about: dict[str, str]) -> str:
    """Two Markdown tables that also read well on a terminal."""
    head = [
        f"{about['cores']} cores of {about['cpu']}",
        f"Python {about['python']}, {about['libraries']}",
    ]
    others = sum(result.proxy.others_s for result in results) / sum(r.proxy.seconds for r in results)
    disturbed = f"While the proxy was under load, other programs had {others:.0%} of its core"
    disturbed += ": measure again when they rest." if others > QUIET else "."
    latency = [
        ["added latency", "direct p50", "proxy p50", "added p50", "aim", ""],
        *(_latency_row(result) for result in results if result.proxy_ms),
    ]
    load = [
        [
            "on one core",
            "at once",
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
    return "\n".join([*head, "", table(latency), "", table(load), "", disturbed])


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
    """How an aim is named in a table; nothing for what has none."""
    return "" if met is None else "met" if met else "MISSED"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well on a terminal. The first row is its head."""
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
