"""The comparison of gateways, and tokenproxy's own requests, for `gateway.py`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.command import progress
from benchmarks.gateway_loads import (
    FEW_GIVEN_IDS,
    FIRST_TURN,
    GIVEN_IDS,
    MESSAGES_STREAM,
    RESPONSES_STREAM,
    SMALL_CHAT,
    STREAM,
    Column,
    Load,
    Loads,
)
from benchmarks.gateway_peers import PEERS, run_peer
from benchmarks.gateway_run import Added, Bench, Cell, Target
from benchmarks.gateway_wrk import Pace
from benchmarks.load import BadResponse
from benchmarks.processes import Cores, Proxy, StartError, proxy

DIRECT, OURS = "direct, no gateway", "tokenproxy, SQLite"
_RECORDED = (SMALL_CHAT, FIRST_TURN, STREAM, MESSAGES_STREAM, RESPONSES_STREAM)
"""Of tokenproxy's own requests, those that have no form that is not recorded."""
Selected = Callable[[str, str], bool]
"""Whether a column is to be measured for a row."""


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One of tokenproxy's own requests."""

    name: str
    direct: Load
    ours: Load


@dataclass(slots=True)
class Timed:
    """What was measured of one kind of request: alone and under load."""

    added: Added = field(default_factory=Added)
    cell: Cell = field(default_factory=Cell)


@dataclass(slots=True)
class Compared:
    """Cells by column and row, in the order of the table."""

    columns: list[Column] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Why gateways were not measured at all, by row."""


def row_titles() -> list[str]:
    """The rows of the comparison."""
    return [DIRECT, OURS, *(peer.title for peer in PEERS)]


def recorded(name: str, is_recorded: bool = True) -> str:
    """The name of tokenproxy's own requests of a column."""
    return f"{name}, {'recorded' if is_recorded else 'not recorded'}"


def request_names() -> list[str]:
    """The names of tokenproxy's own requests."""
    given = [recorded(name, kind) for name in (FEW_GIVEN_IDS, GIVEN_IDS) for kind in (False, True)]
    return [*map(recorded, _RECORDED), *given]


def request_kinds(loads: Loads) -> list[RequestKind]:
    """tokenproxy's own requests, each with what the engine is sent for comparison."""
    columns = {column.name: column for column in (*loads.columns, *loads.translated, *loads.tokens)}
    chats = [RequestKind(recorded(name), columns[name].theirs, columns[name].ours) for name in _RECORDED]
    given = [
        RequestKind(recorded(name, kind), columns[name].theirs, replace(columns[name].ours, sessions=kind))
        for name in (FEW_GIVEN_IDS, GIVEN_IDS)
        for kind in (False, True)
    ]
    return [*chats, *given]


def compare(
    bench: Bench, targets: Sequence[Target], columns: Sequence[Column], rounds: int, selected: Selected
) -> Compared:
    """Measure every column through every target, in rounds; the targets alternate."""
    compared = Compared()
    pairs = [
        (column, target) for column in columns for target in targets if selected(column.name, target.name)
    ]
    compared.columns = [column for column in columns if any(pair[0] is column for pair in pairs)]
    compared.cells = {(column.name, target.name): Cell() for column, target in pairs}
    for column, target in pairs:
        with _problems(compared.cells[column.name, target.name]) as cell:
            cell.note, cell.pace = _prepare(bench, target, column)
    for number in range(rounds):
        for column, target in pairs:
            progress(f"round {number + 1} of {rounds}: {column.name}, {target.name}")
            with _problems(compared.cells[column.name, target.name]) as cell:
                if not cell.problem:
                    cell.samples.append(bench.measure(target, column.load(target.ours), cell.pace))
    return compared


def measure_requests(
    bench: Bench, target: Target, kinds: Sequence[RequestKind], rounds: int, samples: int
) -> dict[str, Timed]:
    """Time tokenproxy's own requests, alone and under load; the kinds alternate."""
    timed = {kind.name: Timed() for kind in kinds}
    for number in range(rounds):
        for kind in kinds:
            progress(f"round {number + 1} of {rounds}: {kind.name}")
            add_round(bench, target, (kind.direct, kind.ours), timed[kind.name], samples)
    return timed


def add_round(bench: Bench, target: Target, loads: tuple[Load, Load], timed: Timed, samples: int) -> None:
    """One round: sequential requests, then load.

    Args:
        loads: what the engine is sent for comparison, and what the target is sent.
    """
    with _problems(timed.cell) as cell:
        if not cell.problem:
            bench.add(timed.added, target, loads, samples)
            cell.pace = Pace.of(bench.seconds, median(timed.added.proxy_ms) / 1000)
            cell.samples.append(bench.measure(target, loads[1], cell.pace))


@contextmanager
def start_targets(
    cores: Cores, engine: Target, folder: Path, rows: Sequence[str]
) -> Iterator[tuple[list[Target], dict[str, str]]]:
    """Start the gateways of some rows; yields them, and why others did not start."""
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        targets = [engine] if DIRECT in rows else []
        if OURS in rows:
            progress(f"start {OURS}")
            running: Proxy = stack.enter_context(proxy(cores.proxy, engine.port, folder / "proxy.log"))
            targets.append(Target(OURS, running.port, running, ours=True))
        for peer in PEERS:
            if peer.title not in rows:
                continue
            progress(f"start {peer.title}")
            try:
                running = stack.enter_context(run_peer(peer, cores.proxy, engine.port, folder))
            except StartError as error:
                absent[peer.title] = str(error)
                print(f"{peer.title}: {error}", file=sys.stderr)
            else:
                targets.append(Target(peer.title, running.port, running, prefix=peer.prefix))
        yield targets, absent


def _prepare(bench: Bench, target: Target, column: Column) -> tuple[str, Pace]:
    """Check a column once, and start its conversations; returns what the response lacks, and its pace."""
    load = column.load(target.ours)
    checked = bench.check(target, load)
    if load.conversations and target.ours:
        progress(f"start {load.conversations:,} conversations: {column.name}, {target.name}")
        bench.begin(target, load)
    elif load.conversations:
        target.positions[load.answer] = load.conversations  # the others are sent the same later turns
    return checked


@contextmanager
def _problems(cell: Cell) -> Iterator[Cell]:
    """Keep the problem of a cell instead of ending the benchmark."""
    try:
        yield cell
    except (BadResponse, OSError) as error:
        cell.problem = str(error) or type(error).__name__
