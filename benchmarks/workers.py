"""Benchmark: the proxy with several worker processes. `--help` describes the measurement."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.cases import Case, cases
from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress, scratch_folder
from benchmarks.load import BadResponse, check_same, throughput
from benchmarks.processes import (
    Cores,
    Proxy,
    StartError,
    children,
    noop_engine,
    pinned,
    proxy,
    tree_cpu_s,
    write_tokenizer,
)
from benchmarks.report import Rate, machine, machine_lines, table, verdict

_DESCRIPTION = """\
Measure what a request costs with several worker processes: `tokenproxy serve --workers N`.

For each number of workers, a proxy of its own with a new SQLite store runs in front of one engine that does
nothing. Clients send small chats, which are recorded, over 128 connections: 32 for each of 4 workers, because
turns that are recorded at the same time in one process share a commit. The proxies are measured one after the
other, in rounds, so that a disturbance of the machine affects all of them.

  requests/s   the median round; it can grow with the workers while there are free cores. Client and engine
               need a core, too.
  CPU ms       CPU time of all processes of the proxy per request
  busiest      share of the requests that the busiest worker served, by its CPU time

The aim: a request costs at most 15% more CPU time with N workers than with one. A missed aim does not change
the exit code: machines differ. Run it on an idle machine. Linux only: it reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/workers.py                   1, 2 and 4 workers: about two minutes
  python benchmarks/workers.py --workers 1 8     other numbers of workers
  python benchmarks/workers.py --quick           check that it runs: a few seconds, imprecise numbers
  python benchmarks/workers.py --json out.json   also write every round to a file
"""

GROWTH = 1.15
"""Aim: the maximum of CPU time per request / that with the first number of workers."""
_CONNECTIONS = 128
_REST_S = 0.5
_RESTING = 0.1
"""Share of a core that a proxy may use at rest."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    seconds: float
    """Duration of each measurement."""
    tokenizer: bool
    """Whether the proxy loads a tokenizer, as in production; this takes seconds."""


FULL = Effort(rounds=7, seconds=3.0, tokenizer=True)
QUICK = Effort(rounds=1, seconds=0.2, tokenizer=False)


@dataclass(slots=True)
class Measured:
    """All rounds with one number of workers."""

    workers: int
    rate: Rate
    busiest: list[float]
    """CPU time of the busiest worker / that of all workers, in each round."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("workers.py", LINUX_ONLY)
    about = machine()
    try:
        results = measure(options.workers, QUICK if options.quick else FULL)
    except (StartError, BadResponse) as error:
        return fail("workers.py", str(error))
    print_results(as_text(results, about), as_json(results, about), options.json)
    return 0


def measure(workers: Sequence[int], effort: Effort) -> list[Measured]:
    """Start an engine and a proxy for each number of workers, and run all rounds.

    Raises:
        StartError: one of them does not start.
        BadResponse: a proxy's response is not the engine's.
    """
    cores, case = Cores.pick(), cases()[0]
    results = [Measured(number, Rate(), []) for number in workers]
    with scratch_folder() as folder, ExitStack() as stack:
        write_tokenizer(folder)
        direct = stack.enter_context(noop_engine(cores.engine, folder if effort.tokenizer else None))
        proxies = [stack.enter_context(_resting(folder, number, direct)) for number in workers]
        stack.enter_context(pinned(cores.engine))
        for running in proxies:
            check_same(case, direct, running.port)
            throughput(running.port, case.request(), _CONNECTIONS, effort.seconds)  # warm up
        for number in range(effort.rounds):
            progress(f"round {number + 1} of {effort.rounds}")
            for result, running in zip(results, proxies, strict=True):
                _one_round(result, running, case, effort.seconds)
    return results


@contextmanager
def _resting(folder: Path, workers: int, engine: int) -> Iterator[Proxy]:
    """Run a proxy on all cores, and wait until none of its processes loads anything."""
    flags = ["--workers", str(workers)]
    with proxy(None, engine, folder / f"proxy-{workers}.log", flags=flags) as running:
        deadline = time.monotonic() + _PATIENCE_S
        expected = workers if workers > 1 else 0
        while True:
            before = running.cpu_s()
            time.sleep(_REST_S)
            if len(children(running.pid)) == expected and running.cpu_s() - before < _RESTING * _REST_S:
                break
            if time.monotonic() > deadline:
                raise StartError(f"{workers} workers did not come to rest within {_PATIENCE_S:g} s")
        yield running


def _one_round(result: Measured, running: Proxy, case: Case, seconds: float) -> None:
    workers = children(running.pid) or [running.pid]
    before = [tree_cpu_s(worker) for worker in workers]
    cpu_s, others_s = running.cpu_s(), _other_programs_s()
    load = throughput(running.port, case.request(), _CONNECTIONS, seconds)
    result.rate.add(load, running.cpu_s() - cpu_s, _other_programs_s() - others_s)
    used = [tree_cpu_s(worker) - start for worker, start in zip(workers, before, strict=True)]
    result.busiest.append(max(used) / (sum(used) or 1.0))


def _other_programs_s() -> float:
    """CPU seconds that programs which are not part of this benchmark have used on all cores."""
    ticks = list(map(int, Path("/proc/stat").read_text().split()[1:4]))
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - tree_cpu_s(os.getpid())


def growth(result: Measured, results: Sequence[Measured]) -> float:
    """CPU time of a request / that with the first number of workers."""
    return result.rate.cpu_ms / results[0].rate.cpu_ms


def as_text(results: Sequence[Measured], about: dict[str, str]) -> str:
    """The results as a Markdown table, aligned for a terminal."""
    cores = int(about["cores"])
    seconds = sum(result.rate.seconds for result in results)
    others = sum(result.rate.other_programs_s for result in results) / seconds / cores
    first = results[0].workers
    rows = [["workers", "requests/s", "p99", "CPU ms", f"CPU / {first}", f"<= {GROWTH:g}x", "busiest"]]
    for result in results:
        grown = growth(result, results)
        rows.append(
            [
                str(result.workers),
                f"{result.rate.per_second:,.0f}",
                f"{median(result.rate.p99_ms):.1f} ms",
                f"{result.rate.cpu_ms:.3f}",
                f"{grown:.2f}x",
                verdict(grown <= GROWTH if result is not results[0] else None),
                f"{median(result.busiest):.0%}",
            ]
        )
    return "\n".join(
        [*machine_lines(about), "", table(rows), "", f"Other programs used {others:.0%} of the cores."]
    )


def as_json(results: Sequence[Measured], about: dict[str, str]) -> dict[str, Any]:
    """Everything, for another program."""
    rows = [
        {"workers": result.workers, "growth": growth(result, results), "busiest": result.busiest}
        | {"cpu_ms_per_request": result.rate.cpu_ms, "rate": asdict(result.rate)}
        for result in results
    ]
    return {"machine": about, "aims": {"growth": GROWTH}, "rows": rows}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="(default: 1 2 4)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
