"""What all benchmarks print: Markdown tables, the machine, and whether aims are met."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

Table = list[list[str]]
"""Rows of cells; the first row is the head."""
Part = Table | str
"""A table, or a remark between tables."""

LIBRARIES = (
    "uvicorn",
    "uvloop",
    "httptools",
    "fastapi",
    "starlette",
    "msgspec",
    "tokenizers",
    "transformers",
)
QUIET = 0.05
"""Share of the measured cores that other programs may use before a warning is printed."""


def machine() -> dict[str, str]:
    """Machine and library versions, on which the numbers depend."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
    }


def machine_text(about: dict[str, str]) -> str:
    """The machine in two lines."""
    return f"{about['cores']} cores of {about['cpu']}\nPython {about['python']}, {about['libraries']}"


def as_text(parts: Sequence[Part]) -> str:
    """Tables and remarks as Markdown that is aligned for a terminal."""
    return "\n\n".join(part if isinstance(part, str) else table(part) for part in parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for a terminal. The first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join([row[0].ljust(widths[0]), *rest]) + " |")
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_json(file: Path, about: dict[str, str], parts: Sequence[Part]) -> None:
    """Write all tables for another program: each has its columns and rows."""
    tables = [{"columns": part[0], "rows": part[1:]} for part in parts if not isinstance(part, str)]
    file.write_text(json.dumps({"machine": about, "tables": tables}, indent=1) + "\n")


def verdict(met: bool | None) -> str:
    """A table's cell for an aim; empty if there is none."""
    return "" if met is None else "met" if met else "MISSED"


def percentile(values: Sequence[float], share: float = 0.5) -> float:
    """The value below which this share of the values is: 0.5 for the median."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def label(ids: int) -> str:
    """A length in a title: `32k`."""
    return f"{ids // 1000}k"


def disturbance(others: float) -> str:
    """A remark on the share of the proxy's core that other programs used."""
    advice = ": measure again on an idle machine." if others > QUIET else "."
    return f"Other programs used {others:.0%} of the proxy's core{advice}"


def progress(step: str) -> None:
    """Report on stderr what is done next."""
    print(f"{step} ...", file=sys.stderr, flush=True)
