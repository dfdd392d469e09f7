"""Results of `gateway.py`, as Markdown tables and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from benchmarks.gateway_compare import DIRECT, OURS, Compared, Timed
from benchmarks.gateway_conversations import STATES, STORES, WHOLE, Conversations
from benchmarks.gateway_goals import Goal, Results, goals
from benchmarks.gateway_loads import Column
from benchmarks.gateway_run import Cell
from benchmarks.gateway_wrk import CONNECTIONS
from benchmarks.report import QUIET, table, verdict

_ABSENT = "-"


def as_text(results: Results, about: dict[str, str]) -> str:
    """The results as Markdown."""
    head = [
        f"{about['date']}, {about['cores']} cores of {about['cpu']}; {about['rounds']} rounds, medians",
        f"Python {about['python']}, {about['libraries']}",
    ]
    parts = ["\n".join(head)]
    if results.compared.columns:
        parts += _compared(results)
    if results.requests:
        parts.append(_requests(results.requests))
    if results.conversations.timed:
        parts += _conversations(results.conversations)
    parts += _remarks(results)
    parts.append(_goals(goals(results)))
    return "\n\n".join(parts)


def as_json(results: Results, about: dict[str, str]) -> dict[str, Any]:
    """Everything, for another program."""
    return {
        "machine": about,
        "columns": [
            {"column": column, "gateway": row, **asdict(cell)}
            for (column, row), cell in results.compared.cells.items()
        ],
        "absent": results.compared.absent,
        "requests": {name: asdict(timed) for name, timed in results.requests.items()},
        "conversations": [
            {"store": store, "state": state, "length": length, **asdict(timed)}
            for (store, state, length), timed in results.conversations.timed.items()
        ],
        "goals": [{**asdict(goal), "met": goal.met} for goal in goals(results)],
    }


def _compared(results: Results) -> list[str]:
    compared = results.compared
    others = [row for row in compared.rows if row not in (DIRECT, OURS)]
    rates = _grid("responses/s on one core", compared, compared.rows, _rate)
    titles = ["tokenproxy's rate / that of", *(column.name for column in compared.columns)]
    ratios = [titles] + [
        [row, *(_number(results.ratio(column.name, row), "x") for column in compared.columns)]
        for row in others
    ]
    measured = [row for row in compared.rows if row != DIRECT]
    cpu = _grid("CPU ms of a request", compared, measured, lambda cell, _: f"{cell.median('cpu_ms'):.3f}")
    p99 = _grid(
        f"p99 on {CONNECTIONS} connections, ms", compared, compared.rows,
        lambda cell, _: f"{cell.median('p99_ms'):,.1f}",
    )  # fmt: skip
    writing = [row for row in measured if _writes(compared, row)]
    written = _grid("KB written per turn", compared, writing, lambda cell, _: _kb(cell))
    return [rates, *([table(ratios)] if others else []), cpu, p99, *([written] if writing else [])]


def _grid(title: str, compared: Compared, rows: Sequence[str], text: Callable[[Cell, Column], str]) -> str:
    """A table with a row for each gateway and a column for each load."""
    lines = [[title, *(_title(column) for column in compared.columns)]]
    lines += [[row, *(_filled(compared, column, row, text) for column in compared.columns)] for row in rows]
    return table(lines)


def _title(column: Column) -> str:
    return f"{column.name}, chunks" if column.chunks else column.name


def _filled(compared: Compared, column: Column, row: str, text: Callable[[Cell, Column], str]) -> str:
    if row in compared.absent:
        return "not started"
    cell = compared.cells.get((column.name, row))
    if cell is None:
        return _ABSENT
    return text(cell, column) if cell.samples else "failed"


def _rate(cell: Cell, column: Column) -> str:
    rate = cell.median("per_second") * (column.chunks or 1)
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _writes(compared: Compared, row: str) -> bool:
    cells = (cell for (_, name), cell in compared.cells.items() if name == row)
    return any(cell.samples and cell.median("written_kb") >= 1 for cell in cells)


def _kb(cell: Cell) -> str:
    return f"{cell.median('written_kb'):,.1f}"


def _requests(requests: dict[str, Timed]) -> str:
    titles = [
        "tokenproxy's requests",
        "added p50",
        "added p99",
        "responses/s",
        "CPU ms",
        "KB written per turn",
    ]
    rows = []
    for name, timed in requests.items():
        times = [
            f"{timed.added.ms(share):.2f} ms" if timed.added.proxy_ms else _ABSENT for share in (0.5, 0.99)
        ]
        load = ["failed"] * 3
        if timed.cell.samples:
            load = [
                f"{timed.cell.median('per_second'):,.0f}",
                f"{timed.cell.median('cpu_ms'):.3f}",
                _kb(timed.cell),
            ]
        rows.append([name, *times, *load])
    return table([titles, *rows])


def _conversations(conversations: Conversations) -> list[str]:
    lengths = conversations.lengths
    titles = [f"{quantile} {length}" for length in lengths for quantile in ("p50", "p99")]
    ends = f"{lengths[-1]} / {lengths[0]}"
    added = [["ms added to a recognised turn", *titles, ends]]
    load = [
        [
            "recognised turns under load",
            *(f"{what} {n}" for n in lengths for what in ("turns/s", "CPU ms", "KB", "recognised")),
        ]
    ]
    for store in STORES:
        for state in STATES:
            timed = [conversations.timed.get((store, state, length)) for length in lengths]
            measured = [row for row in timed if row is not None and row.added.proxy_ms]
            if len(measured) < len(lengths):
                continue
            name = store if state == WHOLE else f"{store}, {state}"
            cells = [f"{row.added.ms(share):.2f}" for row in measured for share in (0.5, 0.99)]
            added.append([name, *cells, f"{measured[-1].added.ms() / measured[0].added.ms():.1f}x"])
            if all(row.cell.samples for row in measured):
                load.append([name, *chain.from_iterable(_loaded(row.cell) for row in measured)])
    return [table(rows) for rows in (added, load) if len(rows) > 1]


def _loaded(cell: Cell) -> list[str]:
    return [
        f"{cell.median('per_second'):,.0f}",
        f"{cell.median('cpu_ms'):.2f}",
        _kb(cell),
        f"{cell.median('extended'):.1%}",
    ]


def _remarks(results: Results) -> list[str]:
    """What was not measured, or not like the others."""
    cells = _cells(results)
    lines = [f"- {name}: {_first_line(problem)}" for name, problem in results.compared.absent.items()]
    lines += [
        f"- conversations, {name}: {_first_line(problem)}"
        for name, problem in results.conversations.problems.items()
    ]
    for name, cell in cells.items():
        if cell.problem:
            lines.append(f"- {name}: {_first_line(cell.problem)}")
        elif cell.note:
            lines.append(f"- {name}: responses {cell.note}")
        if cell.pace is not None and cell.pace.connections < CONNECTIONS:
            count = cell.pace.connections
            lines.append(f"- {name}: loaded on {count} connection{'s' if count > 1 else ''}")
    others = [sample.others for cell in cells.values() for sample in cell.samples]
    if others and (share := sum(others) / len(others)) > QUIET:
        lines.append(
            f"- other programs used {share:.0%} of the gateways' core: measure again on an idle machine"
        )
    return ["\n".join(lines)] if lines else []


def _cells(results: Results) -> dict[str, Cell]:
    """Everything that was measured under load, by its name in remarks."""
    compared = {f"{row}, {column}": cell for (column, row), cell in results.compared.cells.items()}
    requests = {name: timed.cell for name, timed in results.requests.items()}
    conversations = {", ".join(key): timed.cell for key, timed in results.conversations.timed.items()}
    return compared | requests | conversations


def _first_line(problem: str) -> str:
    lines = [line for line in problem.splitlines() if line.strip()]
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else problem.strip()


def _goals(found: Sequence[Goal]) -> str:
    rows = [["goal", "measured", "goal", ""]]
    for goal in found:
        sign = ">=" if goal.least else "<="
        measured = "not measured" if goal.measured is None else f"{goal.measured:.2f}{goal.unit}"
        rows.append([goal.name, measured, f"{sign} {goal.bound:g}{goal.unit}", verdict(goal.met)])
    return table(rows)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return _ABSENT
    return f"{value:.2f}{unit}" if value < 10 else f"{value:,.0f}{unit}"
