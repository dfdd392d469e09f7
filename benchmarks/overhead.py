"""Benchmark: the cost that the proxy adds to a request. `--help` describes the measurement."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.cases import Case, cases
from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress, scratch_folder
from benchmarks.load import BadResponse, check_same, latencies, throughput
from benchmarks.processes import Cores, Proxy, StartError, noop_engine, pinned, proxy, write_tokenizer
from benchmarks.report import Result, machine, overhead_json, overhead_text

_DESCRIPTION = """\
Measure what the proxy adds over a direct connection to an engine that does nothing.

Three processes: the engine (canned answers from a raw socket server), the proxy exactly as `tokenproxy serve`
runs it, with a new SQLite store, and this client. The proxy is pinned to one core; engine and client
use others, or share the remaining one. The cases are measured in rounds, so that a disturbance of the machine
affects all of them:

  added latency  sequential requests on a kept-alive connection, alternately direct and through the
                 proxy. `added p50` is the median through the proxy minus the direct median.
  throughput     many connections that each send the next request after a response. `proxy/s` is the median
                round, `core` the load of the proxy's core, `CPU ms` its process's CPU time per request,
                `p99` the 99th percentile of the latency (with so many connections, mostly queueing).
                If `core` is well below 100%, client, engine or other programs were the limit,
                and `1000/CPU` is the rate that one core could reach.

The aims: at most 1 ms added and at least 1,500 requests/s on one core for small requests; at most 5 ms and
at least 200 requests/s with 100k ids. A missed aim does not change the exit code: machines differ.

Run it on an idle machine. Linux only: it pins processes to cores and reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/overhead.py                     measure everything: about three minutes
  python benchmarks/overhead.py --case "100k ids"   measure the cases whose names contain this text
  python benchmarks/overhead.py --quick             check that it runs: a few seconds, imprecise numbers
  python benchmarks/overhead.py --json out.json     also write every round to a file
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    samples: float
    """Share of each case's latency samples that are taken."""
    seconds: float
    """Duration of each throughput measurement, direct and through the proxy."""
    tokenizer: bool
    """Whether the proxy loads a tokenizer, as in production; this takes seconds."""


FULL = Effort(rounds=5, samples=1.0, seconds=2.0, tokenizer=True)
QUICK = Effort(rounds=1, samples=0.1, seconds=0.1, tokenizer=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("overhead.py", LINUX_ONLY)
    chosen = [case for case in cases() if options.case in case.name]
    if not chosen:
        names = ", ".join(f'"{case.name}"' for case in cases())
        return fail("overhead.py", f'no case name contains "{options.case}"; the cases are {names}')
    about = machine()
    try:
        results = measure(chosen, QUICK if options.quick else FULL)
    except (StartError, BadResponse) as error:
        return fail("overhead.py", str(error))
    print_results(overhead_text(results, about), overhead_json(results, about), options.json)
    return 0


def measure(chosen: Sequence[Case], effort: Effort) -> list[Result]:
    """Start engine and proxy, and run all rounds.

    Raises:
        StartError: one of them does not start.
        BadResponse: the proxy's responses are not the engine's.
    """
    cores = Cores.pick()
    results = [Result(case) for case in chosen]
    with scratch_folder() as folder:
        write_tokenizer(folder)
        with (
            noop_engine(cores.engine, folder if effort.tokenizer else None) as direct,
            proxy(cores.proxy, direct, folder / "proxy.log") as running,
            pinned(cores.client),
        ):
            for case in chosen:
                if not case.paced:  # the same chunks as unpaced, only slower
                    check_same(case, direct, running.port)
            for number in range(effort.rounds):
                progress(f"round {number + 1} of {effort.rounds}")
                for result in results:
                    _one_round(result, direct, running, effort)
    return results


def _one_round(result: Result, direct: int, running: Proxy, effort: Effort) -> None:
    case, request = result.case, result.case.request()
    samples = round(case.samples * effort.samples)
    if samples:
        proxy_ms, direct_ms = latencies((running.port, direct), request, samples)
        result.proxy_ms += proxy_ms
        result.direct_ms += direct_ms
    for port, rate in ((direct, result.direct), (running.port, result.proxy)):
        if not case.paced:
            throughput(port, request, case.connections, 0.0)  # warm up connections and caches
        cpu_s, other_programs_s = running.cpu_s(), running.other_programs_s()
        load = throughput(port, request, case.connections, effort.seconds)
        rate.add(load, running.cpu_s() - cpu_s, running.other_programs_s() - other_programs_s)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--case", default="", metavar="WORDS", help="only cases whose name contains this text"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
