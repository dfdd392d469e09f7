"""Run benchmarks by the names of their rows: `python -m benchmarks ROW ...`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import BadResponse
from benchmarks.measure import Effort
from benchmarks.processes import ROOT, StartError
from benchmarks.report import as_text, machine, machine_text, write_json
from chat_tokenizer import TokenizationError
from tokenproxy.demo import DemoError

SUITES = {
    "request": "what the proxy adds to a request: latency, CPU time, requests/s on one core; 3 minutes",
    "workers": "what a request costs with several worker processes; 2 minutes",
    "append": "the time to append to a prompt, by the length of the history; 2 minutes",
    "turns": "what the proxy adds to a turn of a plain conversation; 3 minutes",
    "fleet": "how it chooses a replica, compared with vllm-router; 8 minutes",
    "soak": "memory and errors under long load; 10 minutes",
    "gateway": "compared with other gateways, by kind of request; 12 minutes",
}
_DESCRIPTION = """\
Benchmarks of tokenproxy. docs/benchmarks.md holds their tables and explains them.

A ROW names what to measure: `request` is a whole benchmark, `request:small chat` the rows of it whose names
contain the text after the colon, `all` is everything.

benchmarks:
"""
_EXAMPLES = """
examples:
  python -m benchmarks --quick "request:small chat"     check that it runs, within seconds
  python -m benchmarks "gateway:1 KB chat" --json out.json
  python -m benchmarks "gateway:stream/tokenproxy" "gateway:stream/vllm-router" --rounds 5
  python -m benchmarks.plan --help                      plan a deployment: docs/scale.md

Only ratios to something that is measured in the same run carry over to other machines. A missed aim does not
change the exit code. Linux only: processes are pinned to cores, and /proc is read.
"""


def suite(name: str) -> Any:
    """The module of a benchmark: `rows()` are its rows, `measure` measures some of them."""
    return importlib.import_module(f"benchmarks.{name}")


def about(name: str) -> str:
    """The section of docs/benchmarks.md about a benchmark."""
    sections = (ROOT / "docs" / "benchmarks.md").read_text().split("\n## ")
    return next(section for section in sections[1:] if f"`python -m benchmarks {name}`" in section)


def choose(texts: Sequence[str]) -> dict[str, list[str]]:
    """The rows of each benchmark that the texts of a command line name.

    Raises:
        ValueError: a text names none.
    """
    chosen: dict[str, list[str]] = {}
    for text in SUITES if "all" in texts else texts:
        name, _, wanted = text.partition(":")
        if name not in SUITES:
            raise ValueError(f'no benchmark is called "{name}"; they are {", ".join(SUITES)}')
        every = suite(name).rows()
        found = [row for row in every if wanted in row]
        if not found:
            raise ValueError(f'no row of {name} contains "{wanted}"; its rows are: {"; ".join(every)}')
        chosen[name] = list(dict.fromkeys([*chosen.get(name, ()), *found]))
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if options.list:
        for name, text in SUITES.items():
            print(f"{name}: {text}", *(f"  {name}:{row}" for row in suite(name).rows()), sep="\n")
        return 0
    if options.about:
        print(about(options.about))
        return 0
    if not options.row:
        _parser().print_help()
        return 0
    try:
        chosen = choose(options.row)
        if sys.platform != "linux":
            raise ValueError("Linux only: it reads /proc")
        effort, measured_on, results = Effort(options.quick, options.rounds, options.seconds), machine(), []
        print(machine_text(measured_on), end="\n\n", flush=True)
        for name, rows in chosen.items():
            parts = suite(name).measure(rows, effort)
            print(as_text(parts), end="\n\n", flush=True)
            results += parts
    except (DemoError, TokenizationError, StartError, BadResponse, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        write_json(options.json, measured_on, results)
    return 0


def _parser() -> argparse.ArgumentParser:
    suites = "\n".join(f"  {name:<9} {about}" for name, about in SUITES.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=f"{_DESCRIPTION}{suites}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("row", nargs="*", metavar="ROW", help="what to measure: BENCHMARK[:TEXT], or all")
    parser.add_argument("--list", action="store_true", help="show all rows")
    parser.add_argument("--about", choices=SUITES, metavar="BENCHMARK", help="explain a benchmark")
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often to measure; not of fleet and soak")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of each load and round; of the soak in all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
