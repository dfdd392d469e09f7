"""Plan a deployment: measure, compare with a simulation, extrapolate. `--help` describes the commands."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import scale_report, scale_validate
from benchmarks.command import LINUX_ONLY, fail, print_results, progress, scratch_folder
from benchmarks.load import BadResponse
from benchmarks.processes import StartError
from benchmarks.scale_bench import open_bench
from benchmarks.scale_calibrate import Calibration
from benchmarks.scale_case import Case
from benchmarks.scale_costs import Costs
from benchmarks.scale_plan import FULL, ROLLOUTS, Needs, Planner, Simulated, Targets, default_load, slices_of
from benchmarks.scale_validate import Pair, Validation
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import TokenizationError

COSTS = Path(__file__).resolve().parent / "scale_costs.json"
CALIBRATE, VALIDATE, PLAN, ALL = "calibrate", "validate", "plan", "all"
_FULL_ROUNDS = 3

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
and Redis servers do one thing at a time; engines prefill and decode (the model of fleet.py). Up to 10,000
rollouts are simulated in full, more as one of several equal parts; 10,000 both ways, to show that it agrees.

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
    if options.command != PLAN and sys.platform != "linux":
        return fail("simulate.py", LINUX_ONLY)
    try:
        return _run(options)
    except (DemoError, TokenizationError, StartError, BadResponse, ValueError) as error:
        return fail("simulate.py", str(error))


def _run(options: argparse.Namespace) -> int:
    parts: dict[str, str] = {}
    results: dict[str, object] = {}
    if options.command == PLAN:
        costs = Costs.read(options.costs)
    else:
        rounds = options.rounds or (1 if options.quick else _FULL_ROUNDS)
        compared = scale_validate.QUICK if options.quick else scale_validate.CASES
        most_turns = scale_validate.QUICK_TURNS if options.quick else None
        costs, pairs = measure(rounds, () if options.command == CALIBRATE else compared, most_turns)
        parts[scale_report.COSTS] = scale_report.costs_text(costs)
        results["costs"] = asdict(costs)
        if pairs:
            text = f"{scale_validate.as_text(pairs)}\n\n{scale_validate.summary(pairs)}"
            parts[scale_report.VALIDATION] = text
            results["validation"] = {pair.case.name: pair.values() for pair in pairs}
        if options.command != VALIDATE:
            costs.write(options.costs)
    if options.command in (PLAN, ALL):
        planner = _planner(options, costs)
        needed = plan(planner, [100, 1_000] if options.quick else options.rollouts)
        parts[scale_report.PLAN] = scale_report.plan_text(planner, needed)
        results["plan"] = [{"needs": asdict(needs), "simulated": list(map(asdict, s))} for needs, s in needed]
        results["limits"] = list(map(asdict, planner.limits()))
    print_results("\n\n".join(parts.values()), results, options.json)
    if options.write:
        for part, text in parts.items():
            scale_report.write_page(part, text)
    return 0


def measure(rounds: int, compared: Sequence[Case], most_turns: int | None) -> tuple[Costs, list[Pair]]:
    """Measure the costs and, alternately, the cases to compare with the simulation, which may be none.

    Args:
        most_turns: see `Calibration`.

    Raises:
        StartError: a process does not start, or Redis is not installed.
        BadResponse: a response is an error.
    """
    checkpoint = ensure_checkpoint()
    calibration, validation = Calibration(most_turns), Validation(compared)
    cases = [cell.case for cell in calibration.cells] + [pair.case for pair in validation.pairs]
    with scratch_folder() as folder:
        with open_bench(checkpoint, cases, folder) as bench:
            for number in range(rounds):
                progress(f"calibrate: round {number + 1} of {rounds}, {len(calibration.cells)} measurements")
                calibration.round(bench)
                validation.round(bench, number, rounds)
        calibration.probe(checkpoint, folder)
    costs = calibration.costs()
    validation.simulate(costs)
    return costs, validation.pairs


def plan(planner: Planner, rollouts: Sequence[int]) -> list[tuple[Needs, list[Simulated]]]:
    """What each number of rollouts needs, and its simulation; the largest full one also in parts."""
    needed = []
    for number in rollouts:
        needs = planner.needs(number)
        simulated = [planner.simulate(needs, slices_of(needs))]
        if number == FULL and needs.processes > 1:
            simulated.append(planner.simulate(needs, needs.processes))
        needed.append((needs, simulated))
    return needed


def _planner(options: argparse.Namespace, costs: Costs) -> Planner:
    case = Case(
        "plan",
        rollouts=0,
        turns=options.turns,
        opening_ids=options.opening,
        appended_ids=options.appended,
        completion_ids=options.completion,
        stream=options.stream,
        think_s=options.think_s,
    )
    load = default_load(case)
    speed = replace(
        load.speed,
        prefill_per_s=options.prefill_per_s,
        decode_per_s=options.decode_per_s,
        running=options.running,
    )
    targets = Targets(link_gbit=options.link_gbit, watch_interval_s=options.watch_interval_s)
    return Planner(replace(load, speed=speed), costs, targets)


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=kind)
    parser.add_argument("command", choices=(CALIBRATE, VALIDATE, PLAN, ALL))
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every result to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    parser.add_argument(
        "--costs", type=Path, default=COSTS, metavar="FILE", help=f"(benchmarks/{COSTS.name})"
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help=f"of the measurements ({_FULL_ROUNDS})")
    group = parser.add_argument_group("what is planned")
    group.add_argument("--rollouts", type=_positive, nargs="+", default=list(ROLLOUTS), metavar="N")
    group.add_argument("--turns", type=_positive, default=10, metavar="N", help="of a rollout (10)")
    group.add_argument("--opening", type=_positive, default=2_000, metavar="IDS", help="first prompt (2000)")
    group.add_argument("--appended", type=_positive, default=400, metavar="IDS", help="tool's result (400)")
    group.add_argument("--completion", type=_positive, default=200, metavar="IDS", help="answer (200)")
    group.add_argument("--think-s", type=float, default=5.0, metavar="S", help="mean time of a tool (5)")
    group.add_argument("--stream", action="store_true", help="answers are streamed, each id in a chunk")
    load = default_load(Case("", 0, 1, 1, 1, 1))
    group.add_argument("--prefill-per-s", type=float, default=load.speed.prefill_per_s, metavar="IDS")
    group.add_argument("--decode-per-s", type=float, default=load.speed.decode_per_s, metavar="IDS")
    group.add_argument("--running", type=_positive, default=load.speed.running, metavar="N")
    group.add_argument("--link-gbit", type=float, default=Targets().link_gbit, metavar="N")
    group.add_argument("--watch-interval-s", type=float, default=Targets().watch_interval_s, metavar="S")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
