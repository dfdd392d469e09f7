"""The measurements of `simulate.py calibrate`: what turns cost on this machine, at some lengths."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.command import progress, scratch_folder
from benchmarks.gateway_run import settle
from benchmarks.processes import Cores, Proxy, engine_fleet, pinned, process_cpu_s, proxy
from benchmarks.report import machine
from benchmarks.scale_bench import Bench, Measured, open_bench
from benchmarks.scale_case import Case
from benchmarks.scale_costs import APPENDED, QUANTITIES, REFERENCE, Costs, Curve, Points, TurnCosts, rising

LENGTHS = (1_000, 8_000, 32_000)
"""Ids of the openings."""
LONG = 800
"""Sampled ids of the long answers."""
_ROLLOUTS, _TURNS = 24, 7
_ALONE_S = {False: 0.02, True: 1.0}
"""Time of the engine for an answer to the only rollout, by whether it is streamed: 5 ms for a chunk."""
_WAYS = (("Redis", False), ("Redis", True), ("memory", False))
_WATCHED, _WATCH_S = 64, 0.5
"""Engines, and seconds between two checks of one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: the first turns of some rollouts, then all others."""

    case: Case
    kind: str
    """`length`: with the reference answer. `long`: with a long one. `alone`: one rollout."""

    @property
    def way(self) -> str:
        """As `Costs.turns` names it."""
        return f"{self.case.store} {'stream' if self.case.stream else 'whole'}"

    @property
    def later_ids(self) -> float:
        """Mean length of the prompts after the first turn."""
        return self.case.prompt_ids(self.case.turns) / 2 + self.case.prompt_ids(0) / 2


@dataclass(slots=True)
class Samples:
    """All rounds of one cell."""

    first: list[Measured] = field(default_factory=list)
    later: list[Measured] = field(default_factory=list)

    def median(self, quantity: str, *, first: bool) -> float:
        """The median round."""
        return median(getattr(each, quantity) for each in (self.first if first else self.later))


def cells() -> list[Cell]:
    """Everything that is measured."""
    made = []
    for store, stream in _WAYS:
        name = f"{store}-{'stream' if stream else 'whole'}"
        for length in LENGTHS:
            case = Case(f"{name}-{length}", _ROLLOUTS, _TURNS, length, APPENDED, REFERENCE, stream, store=store)
            made.append(Cell(case, "length"))
        case = Case(f"{name}-long", _ROLLOUTS, _TURNS, LENGTHS[0], APPENDED, LONG, stream, store=store)
        made.append(Cell(case, "long"))
        alone = Case(
            f"{name}-alone", 1, 4 if stream else 30, LENGTHS[0], APPENDED, REFERENCE, stream, 0.0,
            _ALONE_S[stream], store,
        )  # fmt: skip
        made.append(Cell(alone, "alone"))
    return made


class Calibration:
    """Collects rounds, and makes the costs of their medians."""

    def __init__(self) -> None:
        self.cells = cells()
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

    def probe(self, tokenizer: Path, folder: Path, seconds: float) -> None:
        """Measure what it costs a proxy at rest to check its engines.

        Raises:
            StartError: a process does not start.
        """
        cores = Cores.pick()
        flags = ["--watch-interval-s", str(_WATCH_S)]
        fleet = ["--replicas", str(_WATCHED), "--slow", "0"]
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
        alone = chosen["alone"]
        busy = curves["proxy_ms"].later
        reached = self._samples[alone.case.name].median("proxy_ms", first=False)
        at = next((y for x, y in busy if x >= alone.later_ids), busy[-1][1])
        return TurnCosts(curves, max(0.0, reached - at))

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
        slope = (self._samples[long.case.name].median(quantity, first=False) - later[0][1]) / (LONG - REFERENCE)
        return Curve(first, later, max(0.0, slope))


def calibrate(checkpoint: Path, rounds: int) -> Costs:
    """Measure everything, some rounds.

    Raises:
        StartError: a process does not start.
        BadResponse: a response is an error.
    """
    calibration = Calibration()
    with scratch_folder() as folder:
        with open_bench(checkpoint, [cell.case for cell in calibration.cells], folder) as bench:
            for number in range(rounds):
                progress(f"calibrate: round {number + 1} of {rounds}, {len(calibration.cells)} measurements")
                calibration.round(bench)
        progress("calibrate: what it costs to watch engines")
        calibration.probe(checkpoint, folder, 3.0)
    return calibration.costs()


def _share_at_rest(running: Proxy, seconds: float) -> float:
    """Share of a core that a proxy uses while it serves nothing."""
    settle(running)
    start, cpu_s = time.perf_counter(), process_cpu_s(running.pid)
    time.sleep(seconds)
    return (process_cpu_s(running.pid) - cpu_s) / (time.perf_counter() - start)
