"""The proxy with several worker processes: what a request costs with `tokenproxy serve --workers N`."""

from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.measure import Bench, Cell, Effort, Target
from benchmarks.processes import Cores, engines, pinned, proxy, scratch_folder
from benchmarks.report import Part, progress, verdict
from benchmarks.request import make_loads
from benchmarks.texts import Words

GROWTH = 1.15
_CONNECTIONS = 128


def rows() -> list[str]:
    """Numbers of workers."""
    return ["1", "2", "4"]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some numbers of workers.

    Raises:
        StartError: a process does not start.
        BadResponse: a proxy's response is not the engine's.
    """
    cores, words = Cores.pick(), Words()
    loads = make_loads(words)
    column, rounds = loads.columns["small chat"], effort.rounds or int(effort.pick(7, 1))
    cells = [Cell(connections=_CONNECTIONS) for _ in chosen]
    with scratch_folder() as folder, ExitStack() as stack:
        words.write(folder)
        (port,) = stack.enter_context(engines(cores.engine, folder, loads.answers))
        bench, targets, seconds = Bench(port, loads), [], effort.seconds or effort.pick(3.0, 0.2)
        for number in chosen:
            log = folder / f"proxy-{number}.log"
            running = stack.enter_context(proxy(None, [port], log, "--workers", number))
            running.rest()
            targets.append(Target(running.port, running))
        stack.enter_context(pinned(cores.engine))
        for target in targets:
            bench.check(target, column.ours)
            bench.under_load(Cell(connections=_CONNECTIONS), target, column.ours, seconds)  # warms up
        for done in range(rounds):
            progress(f"workers: round {done + 1} of {rounds}")
            for cell, target in zip(cells, targets, strict=True):
                bench.under_load(cell, target, column.ours, seconds)
    first = cells[0].median("cpu_ms")
    table = [["workers", "requests/s", "p99", "CPU ms", f"CPU / {chosen[0]}", f"<= {GROWTH:g}x", "busiest"]]
    for number, cell in zip(chosen, cells, strict=True):
        grown = cell.median("cpu_ms") / first
        table.append(
            [
                number,
                f"{cell.median('per_second'):,.0f}",
                f"{cell.median('p99_ms'):.1f} ms",
                f"{cell.median('cpu_ms'):.3f}",
                f"{grown:.2f}x",
                verdict(grown <= GROWTH if cell is not cells[0] else None),
                f"{cell.median('busiest'):.0%}",
            ]
        )
    return [table]
