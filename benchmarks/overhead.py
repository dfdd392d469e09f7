"""What does the proxy add to a request? The command; `--help` says what is measured and how."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # of a program run by its path, Python puts the folder on the search path: this package is one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.cases import Case, cases
from benchmarks.load import BadAnswer, check_same, latencies, throughput
from benchmarks.processes import Cores, Proxy, StartError, noop_engine, pinned, proxy, write_tokenizer
from benchmarks.report import Result, machine, overhead_json, overhead_text

_DESCRIPTION = """\
Measure what the proxy adds over a direct connection to an engine that does nothing.

Three processes: the engine (canned answers from a raw socket server), the proxy exactly as `tokenproxy serve`
runs it, recording to a new SQLite file, and this client. The proxy is pinned to one core; engine and client
have others, or share the one that is left. All cases are gone through in rounds, so that a busy minute of the
machine spoils no case alone:

  added latency  requests one after the other on a kept-alive connection, in turns direct and through the
                 proxy. `added p50` is the median through the proxy minus the direct median.
  throughput     many connections, each of which asks again as soon as it is answered. `proxy/s` is the median
                 round, `core` how busy the proxy kept its core, `CPU ms` what a request cost its process,
                 `p99` how long the slowest hundredth waited (with so many at once, mostly for each other).
                 Where `core` is well below 100%, client and engine were the limit, or other programs were,
                 and `1000/CPU` says what one core could do.

The aims: at most 1 ms added and at least 1,500 requests/s on one core for small requests; at most 5 ms and
at least 200 requests/s with 100k ids. A missed aim does not change the exit code: machines differ.

Run it where nothing else runs. Linux only: it pins processes to cores and reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/overhead.py                     everything: some three minutes
  python benchmarks/overhead.py --case "100k ids"   the cases whose names hold these words
  python benchmarks/overhead.py --quick             does it run: a few seconds, and numbers that mean little
  python benchmarks/overhead.py --json out.json     every round by itself, for another program
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    samples: float
    """Share of the samples that each case wants for its latency."""
    seconds: float
    """Throughput of each case, direct and through the proxy, in each round."""
    tokenizer: bool
    """Whether the proxy loads one, as in earnest: seconds at its start."""


FULL = Effort(rounds=5, samples=1.0, seconds=2.0, tokenizer=True)
QUICK = Effort(rounds=1, samples=0.1, seconds=0.1, tokenizer=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if not hasattr(os, "sched_setaffinity"):
        return _fail("Linux only: it pins processes to cores and reads /proc")
    chosen = [case for case in cases() if options.case in case.name]
    if not chosen:
        names = ", ".join(f'"{case.name}"' for case in cases())
        return _fail(f'no case holds "{options.case}" in its name; there are {names}')
    about = machine()
    try:
        results = measure(chosen, QUICK if options.quick else FULL)
    except (StartError, BadAnswer) as error:
        return _fail(str(error))
    print(overhead_text(results, about))
    if options.json is not None:
        options.json.write_text(json.dumps(overhead_json(results, about), indent=1) + "\n")
    return 0


def measure(chosen: Sequence[Case], effort: Effort) -> list[Result]:
    """Start engine and proxy, and run all rounds.

    Raises:
        StartError: one of them does not come up.
        BadAnswer: the proxy's answers are not the engine's.
    """
    cores = Cores.pick()
    results = [Result(case) for case in chosen]
    with tempfile.TemporaryDirectory(prefix="tokenproxy-bench-") as scratch:
        folder = Path(scratch)
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
                print(f"round {number + 1} of {effort.rounds} ...", file=sys.stderr)
                for result in results:
                    _one_round(result, direct, running, effort)
    return results


def _one_round(result: Result, direct: int, running: Proxy, effort: Effort) -> None:
    case, request = result.case, result.case.request()
    samples = round(case.samples * effort.samples)
    if samples:
        through, straight = latencies((running.port, direct), request, samples)
        result.proxy_ms += through
        result.direct_ms += straight
    for port, rate in ((direct, result.direct), (running.port, result.proxy)):
        if not case.paced:
            throughput(port, request, case.connections, 0.0)  # connections and caches warm up
        cpu_s, others_s = running.cpu_s(), running.others_s()
        answered = throughput(port, request, case.connections, effort.seconds)
        rate.add(answered, running.cpu_s() - cpu_s, running.others_s() - others_s)


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=kind)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--case", default="", metavar="WORDS", help="only cases whose name holds these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    return parser


def _fail(message: str) -> int:
    print(f"overhead.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
