"""The measurements of `simulate.py calibrate`: what turns cost on this machine, at some lengths."""

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.command import progress
from benchmarks.gateway_run import settle
from benchmarks.processes import Cores, Proxy, engine_fleet, pinned, process_cpu_s, proxy
from benchmarks.report import machine
from benchmarks.scale_bench import Bench, Measured
from benchmarks.scale_case import Case
from benchmarks.scale_costs import (
    APPENDED,
    CPU_QUANTITIES,
    QUANTITIES,
    REFERENCE,
    Costs,
    Curve,
    Points,
    TurnCosts,
    interpolate,
    rising,
)

LENGTHS = (1_000, 8_000, 32_000)
"""Ids of the openings."""
LONG = 800
"""Sampled ids of the long answers."""
_ROLLOUTS, _TURNS = 64, 6
_BUSY_S = {False: 0.03, True: 0.2}
"""Time of the engine for an answer, so short that all rollouts together keep the proxy's core busy."""
_BUSY_THINK_S = {False: 0.05, True: 0.2}
"""Mean pause before each turn. Without one the rollouts move in step, and a turn costs a quarter less."""
_APART, _APART_TURNS = 6, {False: 9, True: 3}
_APART_S = {False: 0.1, True: 1.5}
"""Rollouts, their turns and the engine's time for an answer: the proxy's core is about a tenth busy."""
_WAYS = (("Redis", False), ("Redis", True), ("memory", False))
_WATCHED, _WATCH_S = 64, 0.5
"""Engines, and seconds between two checks of one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: the first turns of some rollouts, then all others."""

    case: Case
    kind: str
    """`length`: with the reference answer. `long`: with a long one. `apart`: with pauses between steps."""

    @property
    def way(self) -> str:
        """As `Costs.turns` names it."""
        return f"{self.case.store} {'stream' if self.case.stream else 'whole'}"

    @property
    def later_ids(self) -> float:
        """Mean length of the prompts after the first turn."""
        return self.case.prompt_ids(self.case.turns) / 2 + self.case.prompt_ids(0) / 2

    def shortened(self, most_turns: int) -> "Cell":
        """The same measurement with at most so many turns of each rollout."""
        return replace(self, case=replace(self.case, turns=min(self.case.turns, most_turns)))


@dataclass(slots=True)
class Samples:
    """All rounds of one cell."""

    first: list[Measured] = field(default_factory=list)
    later: list[Measured] = field(default_factory=list)

    def median(self, quantity: str, *, first: bool) -> float:
        """The median round."""
        values: list[float] = [getattr(each, quantity) for each in (self.first if first else self.later)]
        return median(values)


def cells() -> list[Cell]:
    """Everything that is measured."""
    made = []
    for store, stream in _WAYS:
        name = f"{store}-{'stream' if stream else 'whole'}"
        for length in LENGTHS:
            case = Case(f"{name}-{length}", _ROLLOUTS, _TURNS, length, APPENDED, REFERENCE, stream)
            case = replace(case, service_s=_BUSY_S[stream], think_s=_BUSY_THINK_S[stream])
            made.append(Cell(replace(case, store=store), "length"))
        long = replace(made[-len(LENGTHS)].case, name=f"{name}-long", completion_ids=LONG)
        made.append(Cell(long, "long"))
        turns, service_s = _APART_TURNS[stream], _APART_S[stream]
        apart = replace(made[-len(LENGTHS) - 1].case, name=f"{name}-apart", rollouts=_APART, turns=turns)
        made.append(Cell(replace(apart, service_s=service_s, think_s=service_s / 5), "apart"))
    return made


class Calibration:
    """Collects rounds, and makes the costs of their medians."""

    def __init__(self, most_turns: int | None = None) -> None:
        """Nothing is measured yet.

        Args:
            most_turns: how many turns a rollout has at most; None for as many as a measurement needs.
        """
        self.cells = cells() if most_turns is None else [each.shortened(most_turns) for each in cells()]
        self._samples: dict[str, Samples] = defaultdict(Samples)
        self._searches: list[float] = []
        self._probes: list[float] = []

    def round(self, bench: Bench) -> None:
        """Measure every cell once.

        Raises:
            BadResponse: see `Bench.measure`.
        """
        for cell in self.cells:
            clients = bench.clients(cell.case)
            samples = self._samples[cell.case.name]
            samples.first.append(bench.measure(cell.case, clients, 1))
            samples.later.append(bench.measure(cell.case, clients))
        self._searches.append(bench.search_ms())

    def measure(self, bench: Bench, tokenizer: Path, folder: Path, rounds: int) -> Costs:
        """Measure everything, some rounds."""
        for number in range(rounds):
            progress(f"calibrate: round {number + 1} of {rounds}, {len(self.cells)} measurements")
            self.round(bench)
        self.probe(tokenizer, folder)
        return self.costs()

    def probe(self, tokenizer: Path, folder: Path, seconds: float = 3.0) -> None:
        """Measure what it costs a proxy at rest to check its engines, with two proxies of its own.

        Raises:
            StartError: a process does not start.
        """
        cores = Cores.pick()
        flags = ["--watch-interval-s", str(_WATCH_S)]
        fleet = ["--replicas", str(_WATCHED), "--slow", "0"]
        progress("calibrate: what it costs a proxy to watch its engines")
        used = []
        with pinned(cores.client), engine_fleet(cores.engine, tokenizer, fleet) as ports:
            for watched in (1, _WATCHED):
                log = folder / f"watch-{watched}.log"
                some = ports[:watched]
                with proxy(cores.proxy, some, log, store="memory:", flags=flags) as running:
                    used.append(_share_at_rest(running, seconds))
        checks = (_WATCHED - 1) / _WATCH_S
        self._probes.append(1000 * max(0.0, used[1] - used[0]) / checks)

    def costs(self) -> Costs:
        """The medians of all rounds."""
        ways = dict.fromkeys(cell.way for cell in self.cells)
        turns = {way: self._turn_costs(way) for way in ways}
        redis = [s for name, s in self._samples.items() if name.startswith("Redis")]
        others = median(each.others[0] for s in self._samples.values() for each in s.later)
        return Costs(
            machine(),
            turns,
            search_ms=median(self._searches),
            probe_ms=median(self._probes) if self._probes else 0.0,
            scripts=median(each.scripts for s in redis for each in s.later),
            others=others,
        )

    def _turn_costs(self, way: str) -> TurnCosts:
        chosen = {cell.kind: cell for cell in self.cells if cell.way == way}
        curves = {quantity: self._curve(way, quantity) for quantity in QUANTITIES}
        apart = chosen["apart"]
        samples = self._samples[apart.case.name].later
        # a share of the steps arrived at a busy loop all the same
        idle = 1 - median(each.run.turns * each.proxy_ms / 1000 / each.run.seconds for each in samples)
        more = {}
        for quantity in CPU_QUANTITIES:
            busy = interpolate(curves[quantity].later, apart.later_ids)
            reached = self._samples[apart.case.name].median(quantity, first=False)
            more[quantity] = max(0.0, reached - busy) / max(0.1, idle)
        return TurnCosts(curves, more)

    def _curve(self, way: str, quantity: str) -> Curve:
        lengths = [cell for cell in self.cells if cell.way == way and cell.kind == "length"]
        (long,) = (cell for cell in self.cells if cell.way == way and cell.kind == "long")

        def points(first: bool) -> Points:
            return rising(
                [
                    (
                        cell.case.opening_ids if first else cell.later_ids,
                        max(0.0, self._samples[cell.case.name].median(quantity, first=first)),
                    )
                    for cell in lengths
                ]
            )

        first, later = points(True), points(False)
        # the prompts of these rollouts grow faster
        reached = self._samples[long.case.name].median(quantity, first=False)
        slope = (reached - interpolate(later, long.later_ids)) / (LONG - REFERENCE)
        return Curve(first, later, max(0.0, slope))


def _share_at_rest(running: Proxy, seconds: float) -> float:
    """Share of a core that a proxy uses while it serves nothing."""
    settle(running)
    start, cpu_s = time.perf_counter(), process_cpu_s(running.pid)
    time.sleep(seconds)
    return (process_cpu_s(running.pid) - cpu_s) / (time.perf_counter() - start)
