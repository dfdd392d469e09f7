"""The comparison of `simulate.py validate`: small cases in reality and in the simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from benchmarks.command import progress
from benchmarks.report import percentile, table, verdict
from benchmarks.scale_bench import Bench, Measured
from benchmarks.scale_case import Case
from benchmarks.scale_costs import Costs
from benchmarks.scale_model import CaseSimulation, Outcome

AIM = 0.2
"""Aim: the simulated value differs by at most this share from the measured one."""
CASES = (
    Case("10 rollouts", 10, 16, 1_500, 400, 200, think_s=0.05, service_s=0.05),
    Case("40 rollouts", 40, 10, 1_500, 400, 200, think_s=0.05, service_s=0.05),
    Case("100 rollouts", 100, 8, 1_500, 400, 200, think_s=0.05, service_s=0.05),
    Case("100 rollouts, slow", 100, 6, 1_500, 400, 200, think_s=0.5, service_s=0.3),
    Case("40 rollouts, 16k ids", 40, 8, 16_000, 400, 200, think_s=0.05, service_s=0.05),
    Case("40 rollouts, long answers", 40, 8, 1_500, 200, 500, think_s=0.05, service_s=0.05),
    Case("10 rollouts, streamed", 10, 5, 1_500, 400, 200, True, think_s=0.2, service_s=1.0),
    Case("40 rollouts, streamed", 40, 5, 1_500, 400, 200, True, think_s=0.2, service_s=1.0),
    Case("40 rollouts, memory", 40, 10, 1_500, 400, 200, think_s=0.05, service_s=0.05, store="memory"),
)
"""None is part of the measurement of the costs."""
QUICK_TURNS = 2
"""Turns of a rollout that only shows that a measurement runs."""
QUICK = tuple(replace(case, turns=QUICK_TURNS) for case in (CASES[1], CASES[7]))


@dataclass(slots=True)
class Pair:
    """All rounds of a case, in reality and simulated."""

    case: Case
    measured: list[Measured] = field(default_factory=list)
    simulated: list[Outcome] = field(default_factory=list)

    @property
    def others(self) -> float:
        """Share of the proxy's core that other programs used."""
        return median(each.others[0] for each in self.measured)

    def values(self) -> dict[str, tuple[float, float]]:
        """For each quantity, the median of the measured rounds and of the simulated ones."""
        runs = [each.run for each in self.measured]
        service_s = self.case.service_s
        real: dict[str, list[float]] = {
            "requests/s": [run.turns / run.seconds for run in runs],
            "makespan": [run.seconds for run in runs],
            "CPU ms": [each.proxy_ms for each in self.measured],
            "added p50": [1000 * (percentile(run.latencies_s, 0.5) - service_s) for run in runs],
            "added p99": [1000 * (percentile(run.latencies_s, 0.99) - service_s) for run in runs],
        }
        simulated: dict[str, list[float]] = {
            "requests/s": [outcome.per_second for outcome in self.simulated],
            "makespan": [outcome.seconds for outcome in self.simulated],
            "CPU ms": [outcome.proxy_ms for outcome in self.simulated],
            "added p50": [1000 * percentile(outcome.added_s, 0.5) for outcome in self.simulated],
            "added p99": [1000 * percentile(outcome.added_s, 0.99) for outcome in self.simulated],
        }
        return {name: (median(real[name]), median(simulated[name])) for name in real}


GOALS = ("requests/s", "makespan", "CPU ms")


class Validation:
    """Collects the rounds of the cases."""

    def __init__(self, cases: Sequence[Case] = CASES) -> None:
        self.pairs = [Pair(case) for case in cases]

    def round(self, bench: Bench, number: int, rounds: int) -> None:
        """Run every case for real, once.

        Raises:
            BadResponse: see `Bench.measure`.
        """
        if self.pairs:
            progress(f"validate: round {number + 1} of {rounds}, {len(self.pairs)} cases")
        for pair in self.pairs:
            pair.measured.append(bench.measure(pair.case, bench.clients(pair.case)))

    def simulate(self, costs: Costs) -> None:
        """Simulate each round, with what other programs took of the cores meanwhile."""
        if self.pairs:
            progress("validate: simulate the same cases")
        for pair in self.pairs:
            pair.simulated = [
                CaseSimulation.beside(pair.case, costs, measured.others) for measured in pair.measured
            ]


def met(pair: Pair) -> bool:
    """Whether rate, makespan and CPU are within the aim."""
    values = pair.values()
    return all(abs(values[name][1] / values[name][0] - 1) <= AIM for name in GOALS)


def as_text(pairs: Sequence[Pair]) -> str:
    """The comparison as a Markdown table."""
    names = list(pairs[0].values())
    head = ["measured / simulated", *(cell for name in names for cell in (name, "ratio")), "others", "<= 20%"]
    rows = [head]
    for pair in pairs:
        cells = []
        for name, (real, simulated) in pair.values().items():
            form = "{:,.0f}" if name == "requests/s" else "{:.2f}" if real < 10 else "{:.0f}"
            unit = {"makespan": " s", "requests/s": "", "CPU ms": ""}.get(name, " ms")
            cells += [
                f"{form.format(real)} / {form.format(simulated)}{unit}",
                f"{simulated / real:.2f}x" if real > 0 else "-",
            ]
        rows.append([pair.case.name, *cells, f"{pair.others:.0%}", verdict(met(pair))])
    return table(rows)


def summary(pairs: Sequence[Pair]) -> str:
    """How many cases meet the aim, and the mean difference of each quantity."""
    reached = sum(map(met, pairs))
    parts = []
    for name in pairs[0].values():
        away = [abs(pair.values()[name][1] / pair.values()[name][0] - 1) for pair in pairs]
        parts.append(f"{name} {mean(away):.0%} (worst {max(away):.0%})")
    return f"{reached} of {len(pairs)} cases within {AIM:.0%}. Mean difference: {', '.join(parts)}."
