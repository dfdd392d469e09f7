"""Results of `append.py`, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.author import RESULT_TOKENS
from benchmarks.report import machine_lines, table, verdict
from benchmarks.ways import Way

LENGTHS = (1_000, 8_000, 32_000, 128_000)
SHORT, LONG = LENGTHS[0], LENGTHS[-1]
GROWTH, GAIN, WAIT_MS, TEXTS = 2.0, 100.0, 5.0, 1.0
"""Aims: append at 128k / append at 1k; render / append at 128k; longest wait of the event loop; append / text
at 128k if the template is not local."""

RENDER, FIRST, TEXT = "render", "append, first of its thread", "text, not local"
"""Names of the rows that are no way to append."""


@dataclass(slots=True)
class Times:
    """Milliseconds of each call of one kind, by the length of the history."""

    name: str
    way: Way | None = None
    """None if the calls are not one of `WAYS`."""
    ms: dict[int, list[float]] = field(default_factory=lambda: {length: [] for length in LENGTHS})

    def p50(self, length: int) -> float:
        """The median of the calls."""
        return median(self.ms[length])

    @property
    def growth(self) -> float:
        """Median at 128k / median at 1k."""
        return self.p50(LONG) / self.p50(SHORT)


@dataclass(slots=True)
class Measured:
    """All results."""

    tokens: dict[int, int]
    """Number of ids of each history, by its nominal length."""
    appends: list[Times]
    render: Times
    text: Times
    """With the template that is not local."""
    waits: dict[str, list[float]]
    """Longest wait of the event loop during each call at 128k, in milliseconds."""
    others: float
    """Share of the machine's CPU time that other programs used."""

    def gain(self, times: Times) -> float:
        """Median render / median of these calls, at 128k."""
        return self.render.p50(LONG) / times.p50(LONG)

    @property
    def local(self) -> list[Times]:
        """The appends with the template that is local."""
        return [times for times in self.appends if times.way is None or times.way.local]

    @property
    def not_local(self) -> list[Times]:
        """The appends with the template that is not."""
        return [times for times in self.appends if times.way is not None and not times.way.local]

    def texts(self, times: Times, length: int) -> float:
        """Median of these calls / median text."""
        return times.p50(length) / self.text.p50(length)

    @property
    def rows(self) -> list[Times]:
        """Everything that was timed."""
        return [*self.appends, self.render, self.text]


def as_json(measured: Measured, about: dict[str, str]) -> dict[str, Any]:
    """All results and samples, as JSON values."""
    rows = measured.rows
    return {
        "machine": about,
        "tokens": measured.tokens,
        "aims": {"growth": GROWTH, "gain": GAIN, "wait_ms": WAIT_MS, "texts": TEXTS},
        "growth": {times.name: times.growth for times in rows},
        "gain": {times.name: measured.gain(times) for times in measured.local},
        "texts": {
            times.name: {length: measured.texts(times, length) for length in LENGTHS}
            for times in measured.not_local
        },
        "wait_ms": {name: median(waits) for name, waits in measured.waits.items()},
        "samples": {"ms": {times.name: times.ms for times in rows}, "wait_ms": measured.waits},
    }


def as_text(measured: Measured, about: dict[str, str]) -> str:
    """The results as Markdown tables, aligned for a terminal."""
    tokens = ", ".join(f"{count:,}" for count in measured.tokens.values())
    lengths = [f"{length // 1000}k" for length in LENGTHS]
    times = [
        ["ms, median, after", *lengths],
        *([row.name, *(f"{row.p50(n):.3f}" for n in LENGTHS)] for row in measured.rows),
    ]
    growth_title, gain_title = f"128k / 1k (<= {GROWTH:g}x)", f"render / append, 128k (>= {GAIN:g}x)"
    ratios = [
        ["ratio", growth_title, "", gain_title, ""],
        *(_ratio_row(row, measured.gain(row)) for row in measured.local),
        [RENDER, f"{measured.render.growth:.0f}x", "", "", ""],
    ]
    texts = [
        ["append / text", *lengths, f"128k <= {TEXTS:g}x"],
        *(_texts_row(row, measured) for row in measured.not_local),
    ]
    loop = [
        ["event loop, during", "longest wait, median", "worst", "aim", ""],
        *(_wait_row(name, waits) for name, waits in measured.waits.items()),
    ]
    head = [
        *machine_lines(about, f"; other programs used {about['others']} of them"),
        f"histories of {tokens} ids; results of {RESULT_TOKENS}",
    ]
    return "\n\n".join(["\n".join(head), *map(table, (times, ratios, texts, loop))])


def _ratio_row(times: Times, gain: float) -> list[str]:
    grows = times.way is not None and times.way.grows
    growth_met = "" if grows else verdict(times.growth <= GROWTH)
    return [times.name, f"{times.growth:.2f}x", growth_met, f"{gain:,.0f}x", verdict(gain >= GAIN)]


def _texts_row(times: Times, measured: Measured) -> list[str]:
    ratios = [measured.texts(times, length) for length in LENGTHS]
    return [times.name, *(f"{ratio:.2f}x" for ratio in ratios), verdict(ratios[-1] <= TEXTS)]


def _wait_row(name: str, waits: Sequence[float]) -> list[str]:
    row = [name, f"{median(waits):.1f} ms", f"{max(waits):.1f} ms"]
    if not name.startswith("append"):
        return [*row, "-", ""]
    return [*row, f"<= {WAIT_MS:g} ms", verdict(median(waits) <= WAIT_MS)]
