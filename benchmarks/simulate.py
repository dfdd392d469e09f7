"""Plan a deployment: measure, compare with a simulation, extrapolate. `--help` describes the commands."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.client import BadResponse
from benchmarks.costs import Case, Costs, TurnCosts, TurnKind
from benchmarks.plan import ENGINE, ROLLOUTS, Planner
from benchmarks.processes import ROOT, StartError
from benchmarks.report import Part, as_text, label, machine_text, write_json
from proxy.demo.errors import DemoError
from tokenization import TokenizationError

COSTS = Path(__file__).resolve().parent / "scale_costs.json"
PAGE = ROOT / "docs" / "scale.md"
_LENGTHS = (1_000, 8_000, 32_000)

_DESCRIPTION = """\
Plan how many proxies, Redis shards, engines, bytes and gigabits a number of concurrent rollouts needs.

  calibrate   measure on this machine what a turn costs: CPU of the proxy by the length of its prompt, whole
              or streamed, with Redis or memory; CPU, memory and disk of Redis; bytes on the network. Writes
              the file of --costs.
  validate    measure that, and alternately run small cases for real: 10 to 100 rollouts in front of one proxy
              process, Redis and an engine with a fixed time for an answer. Then simulate the same cases.
              The aim: requests/s, makespan and CPU differ by at most 20%.
  plan        read --costs; calculate what 100 to 1,000,000 rollouts need, and simulate it. Needs only simpy.
  all         validate, write --costs, plan

The simulation is one of discrete events, with fixed seeds: rollouts think, and take turns; proxy processes
and Redis servers do one thing at a time; engines prefill and decode. Up to 10,000 rollouts are simulated in
full, more as one of several equal parts; 10,000 both ways, to show that it agrees.

Nothing is measured of engines: their speed is an assumption of the options. calibrate and validate pin the
proxy to one core, and engine, client and Redis to another: run them on an idle machine. Linux only.
"""
_EXAMPLES = """\
examples:
  python benchmarks/simulate.py plan                          with the costs in the repository: a minute
  python benchmarks/simulate.py plan --rollouts 5000 --think-s 20 --completion 800 --stream
  python benchmarks/simulate.py plan --decode-per-s 9000 --running 256      your engine
  python benchmarks/simulate.py calibrate --costs mine.json   measure this machine: two minutes
  python benchmarks/simulate.py plan --costs mine.json
  python benchmarks/simulate.py validate                      is the simulation right here? five minutes
  python benchmarks/simulate.py all --write                   everything, and the tables of docs/scale.md
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    try:
        parts = _run(options)
    except (DemoError, TokenizationError, StartError, BadResponse, ValueError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    print("\n\n".join(map(as_text, parts.values())))
    if options.json is not None:
        write_json(options.json, {}, [part for each in parts.values() for part in each])
    if options.write:
        for name, each in parts.items():
            PAGE.write_text(put_into(PAGE.read_text(), name, as_text(each)))
    return 0


def _run(options: argparse.Namespace) -> dict[str, list[Part]]:
    """The parts of the page that a command makes."""
    if options.command == "plan":
        return {"plan": _planner(options, Costs.read(options.costs)).tables(options.rollouts)}
    # the measurements need Redis and an installed model, a plan does not
    from benchmarks.calibrate import CASES, measure, validation_parts

    compared: tuple[Case, ...] = () if options.command == "calibrate" else CASES
    if options.quick:
        compared = tuple(case for case in compared if case.name in ("40 rollouts", "40 rollouts, streamed"))
    rounds = options.rounds or (1 if options.quick else 3)
    costs, pairs = measure(rounds, compared, 2 if options.quick else 100)
    parts = {"costs": costs_parts(costs)}
    if pairs:
        parts["validation"] = validation_parts(pairs)
    if options.command != "validate":
        costs.write(options.costs)
    if options.command == "all":
        parts["plan"] = _planner(options, costs).tables(options.rollouts)
    return parts


def _planner(options: argparse.Namespace, costs: Costs) -> Planner:
    sizes = (options.opening, options.appended, options.completion)
    case = Case("plan", 0, options.turns, *sizes, stream=options.stream, think_s=options.think_s)
    speeds = {"prefill_per_s": options.prefill_per_s, "decode_per_s": options.decode_per_s}
    speed = replace(ENGINE, **speeds, running=options.running)
    return Planner(case, speed, costs, options.link_gbit, options.watch_interval_s)


def costs_parts(costs: Costs) -> list[Part]:
    """What one process and one Redis server carry, and what a turn sends and stores."""
    kinds = [TurnKind(length, 400, 200) for length in _LENGTHS]
    kinds += [TurnKind(length, length, 200, first=True) for length in (_LENGTHS[0], _LENGTHS[-1])]
    lengths = [*map(label, _LENGTHS), "first, 1k", "first, 32k"]
    cpu = [["CPU ms of a turn after", *lengths, "+1,000 sampled", "if idle", "turns/s"]]
    for way, turn in costs.turns.items():
        values = [turn.of("proxy_ms", kind) for kind in kinds]
        more = [1000 * turn.curves["proxy_ms"].per_completion_id, turn.apart["proxy_ms"]]
        cells = [*(f"{value:.2f}" for value in values), *(f"+{value:.1f}" for value in more)]
        cpu.append([f"proxy, {way}", *cells, f"{1000 / values[0]:,.0f}"])
    redis, table = costs.turns["Redis whole"], [["with Redis, of a turn after", *lengths]]

    def add(title: str, quantity: str, form: str, turn: TurnCosts, by: float = 1000) -> None:
        table.append([title, *(format(turn.of(quantity, kind) / by, form) for kind in kinds)])

    add("CPU ms of Redis", "redis_ms", ".2f", redis, 1)
    add("KB of Redis' memory", "memory_bytes", ".1f", redis)
    add("KB written to disk", "aof_bytes", ".1f", redis)
    add("KB, proxy and Redis", "redis_bytes", ".1f", redis)
    add("KB, client and proxy", "client_bytes", ".0f", redis)
    add("KB, proxy and engine", "engine_bytes", ".0f", redis)
    add("KB, client and proxy, streamed", "client_bytes", ".0f", costs.turns["Redis stream"])
    add("KB, proxy and engine, streamed", "engine_bytes", ".0f", costs.turns["Redis stream"])
    return [
        machine_text(costs.machine, f"; other programs used {costs.others:.0%} of the proxy's"),
        cpu,
        table,
        f"One Redis server: {1000 / redis.of('redis_ms', kinds[0]):,.0f} turns/s on a full core, "
        f"{costs.scripts:.0f} requests of the proxy for a turn. A look-up costs it {costs.search_ms:.3f} ms. "
        f"A check of an engine's health costs a proxy process {costs.probe_ms:.3f} ms.",
    ]


def put_into(page: str, part: str, text: str) -> str:
    """A page with a part replaced.

    Raises:
        ValueError: the page lacks the marks of the part.
    """
    begin, end = f"<!-- {part}: made by `python benchmarks/simulate.py` -->", f"<!-- end of {part} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no lines {begin} and {end}: write them where the table belongs")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=kind)
    parser.add_argument("command", choices=("calibrate", "validate", "plan", "all"))
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    parser.add_argument("--write", action="store_true", help="renew the tables of docs/scale.md")
    parser.add_argument(
        "--costs", type=Path, default=COSTS, metavar="FILE", help=f"(benchmarks/{COSTS.name})"
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help="of the measurements (3)")
    group = parser.add_argument_group("what is planned")
    group.add_argument("--rollouts", type=_positive, nargs="+", default=ROLLOUTS, metavar="N")
    group.add_argument("--turns", type=_positive, default=10, metavar="N", help="of a rollout (10)")
    group.add_argument("--opening", type=_positive, default=2_000, metavar="IDS", help="first prompt (2000)")
    group.add_argument("--appended", type=_positive, default=400, metavar="IDS", help="tool's result (400)")
    group.add_argument("--completion", type=_positive, default=200, metavar="IDS", help="answer (200)")
    group.add_argument("--think-s", type=float, default=5.0, metavar="S", help="mean time of a tool (5)")
    group.add_argument("--stream", action="store_true", help="answers are streamed, each id in a chunk")
    group.add_argument("--prefill-per-s", type=float, default=ENGINE.prefill_per_s, metavar="IDS")
    group.add_argument("--decode-per-s", type=float, default=ENGINE.decode_per_s, metavar="IDS")
    group.add_argument("--running", type=_positive, default=ENGINE.running, metavar="N")
    group.add_argument("--link-gbit", type=float, default=25.0, metavar="N")
    group.add_argument("--watch-interval-s", type=float, default=5.0, metavar="S")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
