"""Benchmark: what each way to choose a replica of a fleet costs. `--help` describes the measurement."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress, scratch_folder
from benchmarks.fleet_clients import Clients, Held, hold
from benchmarks.fleet_load import Conversation, make_load
from benchmarks.fleet_model import Totals
from benchmarks.fleet_speeds import CONNECTIONS, REPLICAS, SLOW
from benchmarks.fleet_words import Words
from benchmarks.load import BadResponse
from benchmarks.processes import (
    Cores,
    Proxy,
    StartError,
    engine_fleet,
    get_json,
    pinned,
    proxy,
    vllm_router,
)
from benchmarks.report import machine, machine_lines, percentile, table

ROUTER = Path(__file__).resolve().parent.parent / ".cache/vllm-router/bin/vllm-router"
LIMIT_S = 120.0
_NO_ROUTER = "vllm-router is not installed, so its policies are not measured: run scripts/install-vllm-router"

_DESCRIPTION = f"""\
Hold the same 400 conversations on a fleet of {REPLICAS} engines, of which {SLOW} are three times slower, once
for each way to choose a replica: tokenproxy's policies, and vllm-router's.

The engines are one process. Each is a model of vLLM: a prefix cache of blocks with a bound, a queue, a speed
of prefilling and one of decoding that falls with the number of sequences. They sample and render at almost no
cost; a run's times are those of the model, about 14 times shorter than a real engine's. Half of the
conversations come in groups of eight with equal openings, and every fourth client names its session in
X-Session-ID. With `sessions` all clients do, and tell vllm-router's sticky_least_loaded when they are done:
its best case. Texts render to the ids that were sampled, which also favours vllm-router: it sends text.
A run that takes longer than {LIMIT_S:.0f} s is ended.

  makespan   from the first request to the last response
  hit rate   ids that the engines found in their caches / ids of all prompts
  p50, p99   latency of a turn
  requests   of the replicas with the fewest and the most
  busy       share of the time that the replicas with the least and the most had work
  core       load of the core of tokenproxy or vllm-router; near 100% it was the limit, and not the policy
  exact      turns that continue recorded ids, of all after the first of a conversation

Run it on an idle machine. Linux only: it pins processes to cores and reads /proc.
"""
_EXAMPLES = """\
examples:
  python benchmarks/fleet.py                       measure all policies: about ten minutes
  python benchmarks/fleet.py --only sticky         measure the policies whose names contain this text
  python benchmarks/fleet.py --quick               check that it runs: imprecise numbers
  python benchmarks/fleet_simulation.py            the same load in virtual time, without proxies: seconds
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """A program and its way to choose a replica."""

    program: str
    name: str
    all_sessions: bool = False
    """Whether every client names its session."""
    finish: bool = False
    """Whether clients tell when a session is over."""

    @property
    def title(self) -> str:
        """The name of its row."""
        sessions = "" if self.program == "tokenproxy" else ", sessions" if self.all_sessions else ", plain"
        return f"{self.program} {self.name}{sessions}"


POLICIES = (
    *(
        Policy("tokenproxy", name)
        for name in ("round_robin", "least_loaded", "two_choices", "sticky_least_loaded")
    ),
    Policy("vllm-router", "consistent_hash"),
    Policy("vllm-router", "consistent_hash", all_sessions=True),
    Policy("vllm-router", "cache_aware"),
    Policy("vllm-router", "cache_aware", all_sessions=True),
    Policy("vllm-router", "sticky_least_loaded"),
    Policy("vllm-router", "sticky_least_loaded", all_sessions=True, finish=True),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    conversations: int
    connections: int
    faster: float
    """Speed of the engines' time."""


FULL = Effort(400, CONNECTIONS, 1.0)
QUICK = Effort(24, 12, 4.0)


@dataclass(slots=True)
class Result:
    """All rounds of one policy."""

    policy: Policy
    held: list[Held] = field(default_factory=list)
    totals: list[list[Totals]] = field(default_factory=list)
    """Of each replica, in each round."""
    core: list[float] = field(default_factory=list)
    """Load of the program's core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("fleet.py", LINUX_ONLY)
    policies = [policy for policy in POLICIES if options.only in policy.title]
    if not policies:
        names = ", ".join(f'"{policy.title}"' for policy in POLICIES)
        return fail("fleet.py", f'no policy has a name with "{options.only}"; the policies are {names}')
    if not ROUTER.exists():
        print(_NO_ROUTER, file=sys.stderr)
        policies = [policy for policy in policies if policy.program != "vllm-router"]
    about = machine()
    try:
        results = measure(policies, QUICK if options.quick else FULL, options.rounds)
    except (StartError, BadResponse) as error:
        return fail("fleet.py", str(error))
    print_results(text(results, about), _json(results, about), options.json)
    return 0


def measure(policies: Sequence[Policy], effort: Effort, rounds: int) -> list[Result]:
    """Hold all conversations with each policy, each time on a new fleet; the policies alternate.

    Raises:
        StartError: a process does not start.
        BadResponse: a client got an error.
    """
    load, words = make_load(effort.conversations), Words()
    results = [Result(policy) for policy in policies]
    with scratch_folder() as folder:
        words.write(folder)
        for number in range(rounds):
            for result in results:
                progress(f"round {number + 1} of {rounds}: {result.policy.title}")
                log = folder / f"{number}-{results.index(result)}.log"
                _one_round(result, load, words, effort, folder, log)
    return results


def _one_round(
    result: Result, load: Sequence[Conversation], words: Words, effort: Effort, folder: Path, log: Path
) -> None:
    cores, policy = Cores.pick(), result.policy
    with (
        engine_fleet(cores.engine, folder, ["--faster", str(effort.faster)]) as ports,
        _running(policy, cores.proxy, ports, log) as running,
        pinned(cores.client),
    ):
        before = [_totals(port) for port in ports]
        cpu_s = running.cpu_s()
        clients = Clients(
            running.port, effort.connections, LIMIT_S, policy.all_sessions, policy.finish, effort.faster
        )
        held = hold(load, words, clients)
        result.core.append((running.cpu_s() - cpu_s) / held.makespan_s)
        result.held.append(held)
        after = [_totals(port) for port in ports]
        result.totals.append([_difference(*pair) for pair in zip(after, before, strict=True)])


@contextmanager
def _running(policy: Policy, core: int, ports: Sequence[int], log: Path) -> Iterator[Proxy]:
    if policy.program == "vllm-router":
        with vllm_router(ROUTER, core, ports, log, ["--policy", policy.name]) as running:
            yield running
    else:
        with proxy(core, ports, log, flags=["--policy", policy.name]) as running:
            yield running


def _totals(port: int) -> Totals:
    return Totals(**get_json(port, "/totals"))


def _difference(after: Totals, before: Totals) -> Totals:
    return Totals(
        after.requests - before.requests,
        after.prompt_ids - before.prompt_ids,
        after.cached_ids - before.cached_ids,
        after.completion_ids - before.completion_ids,
        after.busy_s - before.busy_s,
        after.longest_queue,
    )


TITLES = ["policy", "makespan", "hit rate", "p50", "p99", "requests", "busy", "core", "exact"]


def text(results: Sequence[Result], about: dict[str, str]) -> str:
    """The results as a Markdown table, aligned for a terminal; the median round of each policy."""
    rows = [_row(result) for result in results if result.held]
    return "\n".join([*machine_lines(about), "", table([TITLES, *rows])])


def _row(result: Result) -> list[str]:
    held, totals = result.held, result.totals
    hits = [sum(t.cached_ids for t in one) / sum(t.prompt_ids for t in one) for one in totals]
    requests = [[t.requests for t in one] for one in totals]
    busy = [[t.busy_s / one.makespan_s for t in replicas] for one, replicas in zip(held, totals, strict=True)]
    later = sum(len(one.latencies_s) - one.begun for one in held)
    exact = f"{sum(one.extended for one in held) / later:.1%}"
    return [
        result.policy.title,
        f"{'> ' if any(one.cut for one in held) else ''}{median(one.makespan_s for one in held):.1f} s",
        f"{median(hits):.1%}",
        f"{median(percentile(one.latencies_s, 0.5) for one in held):.2f} s",
        f"{median(percentile(one.latencies_s, 0.99) for one in held):.2f} s",
        f"{mean(map(min, requests)):.0f}-{mean(map(max, requests)):.0f}",
        f"{mean(map(min, busy)):.0%}-{mean(map(max, busy)):.0%}",
        f"{mean(result.core):.0%}",
        exact if result.policy.program == "tokenproxy" else "-",
    ]


def _json(results: Sequence[Result], about: dict[str, str]) -> dict[str, object]:
    """Everything, for another program."""
    rows = [
        {"policy": result.policy.title, "core": result.core}
        | {"held": [asdict(one) for one in result.held]}
        | {"totals": [[asdict(t) for t in one] for one in result.totals]}
        for result in results
    ]
    return {"machine": about, "policies": rows}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure each policy (default: 1)")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="only policies whose name contains this text"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
