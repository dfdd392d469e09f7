"""tokenproxy and other gateways in front of the same engine, which answers with fixed bytes at once."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

from benchmarks.loads import (
    COLUMNS,
    FIRST_TURN,
    GIVEN_IDS,
    LONG_ANSWER,
    LONG_BOTH,
    RECOGNISED,
    SMALL_CHAT,
    STREAM,
    Load,
    Loads,
    gateway_loads,
)
from benchmarks.measure import CONNECTIONS, Bench, Cell, Effort, Target
from benchmarks.peers import PEERS, RLLM, ROUTER, run_peer
from benchmarks.processes import Cores, StartError, engines, pinned, proxy, scratch_folder
from benchmarks.report import Part, Table, disturbance, progress, verdict
from chat_tokenizer import ChatTokenizer
from tokenproxy.demo.checkpoint import ensure_checkpoint

DIRECT, OURS = "direct, no gateway", "tokenproxy, SQLite"
_GATEWAYS = (DIRECT, OURS, *(peer.title for peer in PEERS))
_LEAST_RATES = (
    (SMALL_CHAT, ROUTER.title, 0.25),
    (FIRST_TURN, ROUTER.title, 0.3),
    (LONG_ANSWER, ROUTER.title, 0.3),
    (RECOGNISED, ROUTER.title, 0.35),
    (STREAM, ROUTER.title, 0.7),
    (GIVEN_IDS, ROUTER.title, 10.0),
    *((column, RLLM.title, 20.0) for column in (SMALL_CHAT, FIRST_TURN, LONG_ANSWER, LONG_BOTH, STREAM)),
)
"""Goals: least ratio of tokenproxy's rate to that of another gateway, by column."""
_MOST_WRITTEN_KB = 100.0
"""Goal: the most that is written for a first turn."""
Cells = dict[tuple[str, str], Cell]
"""What was measured, by column and gateway."""


def rows() -> list[str]:
    """Columns with gateways."""
    return [f"{column}/{gateway}" for column in COLUMNS for gateway in _GATEWAYS]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some cells; they alternate.

    Raises:
        StartError: the engine or tokenproxy does not start.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    pairs = [(row.partition("/")[0], row.partition("/")[2]) for row in chosen]
    checkpoint, cores, absent = ensure_checkpoint(), Cores.pick(), dict[str, str]()
    cells: Cells = {pair: Cell() for pair in pairs}
    progress("gateway: write the requests")
    loads = gateway_loads(ChatTokenizer.load(checkpoint), int(effort.pick(1000, 100)))
    rounds, seconds = effort.rounds or int(effort.pick(3, 1)), effort.seconds or effort.pick(2.0, 0.3)
    with (
        scratch_folder() as folder,
        engines(cores.engine, checkpoint, loads.answers) as (port,),
        pinned(cores.client),
        ExitStack() as stack,
    ):
        bench = Bench(port, loads)
        names = dict.fromkeys(gateway for _, gateway in pairs)
        targets = {DIRECT: bench.engine} | _start(stack, list(names), cores, port, folder, absent)
        started = [pair for pair in pairs if pair[1] in targets]
        for column, gateway in started:
            cell = cells[column, gateway]
            with cell.problems():
                _prepare(bench, cell, targets[gateway], loads.columns[column].load(gateway == OURS), seconds)
        for number in range(rounds):
            progress(f"gateway: round {number + 1} of {rounds}")
            for column, gateway in started:
                cell, load = cells[column, gateway], loads.columns[column].load(gateway == OURS)
                if not cell.problem:
                    with cell.problems():
                        bench.under_load(cell, targets[gateway], load, seconds)
    goals = _goals(cells)
    return [*_compared(cells, absent, loads), *_remarks(cells, absent), *([goals] if len(goals) > 1 else [])]


def _start(
    stack: ExitStack, names: Sequence[str], cores: Cores, port: int, folder: Path, absent: dict[str, str]
) -> dict[str, Target]:
    """Start gateways by name; why one does not start is kept in `absent`."""
    targets = {}
    if OURS in names:
        running = stack.enter_context(proxy(cores.proxy, [port], folder / "proxy.log"))
        targets[OURS] = Target(running.port, running, ours=True)
    for peer in (peer for peer in PEERS if peer.title in names):
        progress(f"gateway: start {peer.title}")
        try:
            running = stack.enter_context(run_peer(peer, cores.proxy, port, folder))
            targets[peer.title] = Target(running.port, running, prefix=peer.prefix)
        except StartError as error:
            absent[peer.title] = str(error)
            print(f"{peer.title}: {error}", file=sys.stderr)
    return targets


def _prepare(bench: Bench, cell: Cell, target: Target, load: Load, seconds: float) -> None:
    cell.note, took_s = bench.check(target, load)
    # a slow gateway gets so few connections that each can have two responses in five times `seconds`
    cell.connections = max(1, min(CONNECTIONS, int(2.5 * seconds / took_s)))
    if target.running is not None:
        target.running.rest()
    if load.conversations and target.ours:
        progress(f"gateway: start {load.conversations:,} conversations")
        bench.begin(target, load)
    elif load.conversations:
        target.positions[load.answer] = load.conversations  # the others are sent the same later turns


def _ratio(cells: Cells, column: str, gateway: str) -> float | None:
    """tokenproxy's rate on a full core / that of another gateway; None if one was not measured."""
    ours, theirs = cells.get((column, OURS)), cells.get((column, gateway))
    if ours is None or theirs is None or not ours.samples or not theirs.samples:
        return None
    return theirs.median("cpu_ms") / ours.median("cpu_ms")


def _compared(cells: Cells, absent: dict[str, str], loads: Loads) -> Iterator[Table]:
    columns = list(dict.fromkeys(column for column, _ in cells))
    gateways = [name for name in _GATEWAYS if any(gateway == name for _, gateway in cells)]
    measured = [name for name in gateways if name != DIRECT]
    titles = [f"{column}, chunks" if loads.columns[column].chunks else column for column in columns]

    def grid(title: str, names: Sequence[str], text: Callable[[Cell, str], str], head: list[str]) -> Table:
        lines = [[title, *head]]
        for name in names:
            row = []
            for column in columns:
                cell = cells.get((column, name))
                failed = "not started" if name in absent else "-" if cell is None else "failed"
                row.append(text(cell, column) if cell is not None and cell.samples else failed)
            lines.append([name, *row])
        return lines

    def rate(cell: Cell, column: str) -> str:
        per_second = cell.median("per_second") * (loads.columns[column].chunks or 1)
        return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"

    yield grid("responses/s on one core", gateways, rate, titles)
    others = [name for name in measured if name != OURS]
    if others:
        yield [
            ["tokenproxy's rate / that of", *columns],
            *([name, *(_times(_ratio(cells, column, name)) for column in columns)] for name in others),
        ]
    yield grid("CPU ms of a request", measured, lambda cell, _: f"{cell.median('cpu_ms'):.3f}", titles)
    p99 = f"p99 on {CONNECTIONS} connections, ms"
    yield grid(p99, gateways, lambda cell, _: f"{cell.median('p99_ms'):,.1f}", titles)
    writing = [name for name in measured if any(_writes(cells.get((column, name))) for column in columns)]
    if writing:
        yield grid(
            "KB written per turn", writing, lambda cell, _: f"{cell.median('written_kb'):,.1f}", titles
        )


def _writes(cell: Cell | None) -> bool:
    return cell is not None and bool(cell.samples) and cell.median("written_kb") >= 1


def _remarks(cells: Cells, absent: dict[str, str]) -> list[str]:
    """What was not measured, or not like the others."""
    lines = [f"- {name}: {_short(problem)}" for name, problem in absent.items()]
    for (column, gateway), cell in cells.items():
        name = f"{gateway}, {column}"
        if cell.problem:
            lines.append(f"- {name}: {_short(cell.problem)}")
        if cell.note:
            lines.append(f"- {name}: responses {cell.note}")
        if cell.samples and cell.connections < CONNECTIONS:
            lines.append(f"- {name}: loaded on {cell.connections} of {CONNECTIONS} connections")
    others = [sample.others for cell in cells.values() for sample in cell.samples]
    return [*(["\n".join(lines)] if lines else []), *([disturbance(mean(others))] if others else [])]


def _short(problem: str) -> str:
    lines = [line for line in problem.splitlines() if line.strip()]
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else problem.strip()


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def _goals(cells: Cells) -> Table:
    """What was measured next to the least or most that is aimed at."""
    lines = [["goal", "measured", "goal", ""]]
    for column, gateway, least in _LEAST_RATES:
        value = _ratio(cells, column, gateway)
        if value is not None:
            name = f"{column}: rate / that of {gateway}"
            lines.append([name, f"{value:.2f}x", f">= {least:g}x", verdict(value >= least)])
    first = cells.get((FIRST_TURN, OURS))
    if first is not None and first.samples:
        written = first.median("written_kb")
        shown, bound = f"{written:.2f} KB", f"<= {_MOST_WRITTEN_KB:g} KB"
        lines.append([f"{FIRST_TURN}: written per turn", shown, bound, verdict(written <= _MOST_WRITTEN_KB)])
    return lines
