"""How many of everything a number of rollouts needs, and what is too small first: `simulate.py plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import mean

from benchmarks.command import progress
from benchmarks.fleet_model import Speed
from benchmarks.report import percentile
from benchmarks.scale_case import Case
from benchmarks.scale_costs import Costs, TurnKind
from benchmarks.scale_model import Deployment, DeploymentSimulation, Load, Outcome

ROLLOUTS = (100, 1_000, 10_000, 100_000, 1_000_000)
FULL = 10_000
"""The most rollouts that are simulated in full."""
SLICE = 4_000
"""Rollouts of a slice of a larger deployment, about."""
WARM_UP_S, MEASURED_S = 30.0, 30.0
_GIB = 1 << 30
_DEFAULT_PARTITIONS = 16
"""Of a cluster whose URL names no number: more shards are of no use."""


@dataclass(frozen=True, slots=True)
class Targets:
    """How full each part may be in a planned deployment, and what does not depend on the load."""

    proxy: float = 0.7
    """Share of a proxy process' core."""
    redis: float = 0.6
    """Share of a shard's core."""
    engine: float = 0.8
    """Share of the places for running requests."""
    link_gbit: float = 25.0
    """Network card of one machine."""
    partitions: int = 4
    """Partitions of the data for each shard of a cluster: it must be able to grow."""
    watch_interval_s: float = 5.0
    store_max_bytes: float = float(_GIB)
    """The setting of that name."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a number of rollouts needs."""

    rollouts: int
    turns_per_s: float
    processes: int
    shards: int
    shards_without_sessions: int | None
    """None if no number of shards is enough."""
    engines: int
    gbit: float
    """Of the proxies: from and to clients, engines and Redis."""
    memory_gb_per_h: float
    """By which Redis grows while it evicts nothing."""
    disk_gb_per_h: float
    """Written to the append-only files."""
    watching: float
    """Share of each process' core that watching the engines takes."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest load that one part carries while there is enough of all others."""

    name: str
    rollouts: float
    remedy: str


@dataclass(frozen=True, slots=True)
class Simulated:
    """A planned deployment in the simulation."""

    slices: int
    """It is the simulation of one of so many equal parts; 1 for the whole deployment."""
    proxy_busy: float
    redis_busy: float
    per_second: float
    """Turns per second of the whole deployment."""
    added_p50_ms: float
    added_p99_ms: float


class Planner:
    """Calculates from what a turn costs; `simulate` checks the result."""

    def __init__(self, load: Load, costs: Costs, targets: Targets) -> None:
        self._load, self._costs, self._targets = load, costs, targets
        self._turn = costs.turn(load.case.store, load.case.stream)
        case = load.case
        self._kinds = [
            TurnKind(case.prompt_ids(n), case.appended_ids, case.completion_ids, n == 0)
            for n in range(case.turns)
        ]
        self.engine_s, self.per_engine_s = self._one_engine()

    def mean(self, quantity: str) -> float:
        """Of a turn, on average over a rollout."""
        return mean(self._turn.of(quantity, kind) for kind in self._kinds)

    def cpu_ms(self, quantity: str, busy: float) -> float:
        """CPU of a turn in a process that is busy for this share of the time."""
        return self.mean(quantity) + (1 - busy) * self._turn.apart.get(quantity, 0.0)

    @property
    def period_s(self) -> float:
        """Seconds from one turn of a rollout to its next one."""
        return self._load.case.think_s + self.engine_s + self.cpu_ms("proxy_ms", self._targets.proxy) / 1000

    def needs(self, rollouts: int) -> Needs:
        """What this number of rollouts needs."""
        targets, rate = self._targets, rollouts / self.period_s
        engines = ceil(rate / self.per_engine_s)
        watching = self._watching(engines)
        proxy_ms = self.cpu_ms("proxy_ms", targets.proxy)
        redis_ms = self.cpu_ms("redis_ms", targets.redis)
        bytes_per_turn = sum(map(self.mean, ("client_bytes", "engine_bytes", "redis_bytes")))
        # a turn without a session is looked up in every partition
        left = targets.redis - rate * self._costs.search_ms * targets.partitions / 1000
        blind = ceil(rate * (redis_ms - self._costs.search_ms) / 1000 / left) if left > 0 else None
        return Needs(
            rollouts=rollouts,
            turns_per_s=rate,
            processes=ceil(rate * proxy_ms / 1000 / max(0.05, targets.proxy - watching)),
            shards=ceil(rate * redis_ms / 1000 / targets.redis),
            shards_without_sessions=None if blind is None else max(1, blind),
            engines=engines,
            gbit=rate * bytes_per_turn * 8 / 1e9,
            memory_gb_per_h=rate * self.mean("memory_bytes") * 3600 / 1e9,
            disk_gb_per_h=rate * self.mean("aof_bytes") * 3600 / 1e9,
            watching=watching,
        )

    def limits(self) -> list[Limit]:
        """The limits in the order in which a growing number of rollouts reaches them."""
        targets, period_s = self._targets, self.period_s
        turn_bytes = self.mean("aof_bytes")
        bits = 8 * sum(map(self.mean, ("client_bytes", "engine_bytes", "redis_bytes")))
        per_engine = self.per_engine_s * period_s
        found = [
            Limit("one engine", per_engine / targets.engine, "more engines"),
            Limit(
                "one proxy process",
                1000 / self.cpu_ms("proxy_ms", 1.0) * period_s,
                "more processes: `workers`, then replicas of the proxy",
            ),
            Limit(
                "the default `store_max_bytes`",
                _over(targets.store_max_bytes, turn_bytes * len(self._kinds)),
                "set it to what the rollouts take: sessions in use are evicted",
            ),
            Limit(
                "one Redis server",
                1000 / self.cpu_ms("redis_ms", 1.0) * period_s,
                "a cluster, with sessions named by the clients",
            ),
            Limit(
                f"a cluster's {_DEFAULT_PARTITIONS} partitions",
                _DEFAULT_PARTITIONS * 1000 / self.cpu_ms("redis_ms", 1.0) * period_s,
                "name a larger number in the store's URL before it is used first: `partitions`",
            ),
            Limit(
                f"one machine's {targets.link_gbit:g} Gbit/s",
                _over(targets.link_gbit * 1e9, bits) * period_s,
                "proxies on more machines",
            ),
            Limit(
                "look-ups without session names",
                _over(1000, self._costs.search_ms * targets.partitions) * period_s,
                "name sessions: every partition answers every look-up without a name",
            ),
            Limit(
                "each process watches each engine: half of its core",
                _over(1000 * targets.watch_interval_s, self._costs.probe_ms) * per_engine / 2,
                "split into cells, each with its own engines; or a longer `watch_interval_s`",
            ),
        ]
        return sorted(found, key=lambda limit: limit.rollouts)

    def simulate(self, needs: Needs, slices: int) -> Simulated:
        """Simulate one of `slices` equal parts of a deployment.

        The load of the other parts on the part's Redis shard comes in at random.
        """
        shards = max(1, round(needs.shards / slices))
        elsewhere = max(0.0, needs.turns_per_s / needs.shards - needs.turns_per_s / slices / shards)
        deployment = Deployment(
            rollouts=round(needs.rollouts / slices),
            processes=max(1, round(needs.processes / slices)),
            shards=shards,
            engines=max(1, round(needs.engines / slices)),
            background_per_s=elsewhere,
            watching=needs.watching,
        )
        part = "in full" if slices == 1 else f"one of {slices} parts"
        progress(f"plan: simulate {needs.rollouts:,} rollouts, {part}")
        outcome = DeploymentSimulation(self._load, self._costs, deployment).run(WARM_UP_S, MEASURED_S)
        return _simulated(outcome, deployment, slices)

    def _watching(self, engines: int) -> float:
        return engines * self._costs.probe_ms / 1000 / self._targets.watch_interval_s

    def _one_engine(self) -> tuple[float, float]:
        """The time of an answer, and the turns per second, of an engine that is as full as it may be."""
        speed, case = self._load.speed, self._load.case
        running = self._targets.engine * speed.running
        new_ids = mean(case.opening_ids if kind.first else case.appended_ids for kind in self._kinds)
        rate = 0.0
        for _ in range(100):  # the more it prefills, the slower it decodes
            prefilling = min(1.0, rate * new_ids / speed.prefill_per_s)
            slowed = 1 - prefilling * (1 - speed.during_prefill)
            decode_s = case.completion_ids * (running + speed.half) / (speed.decode_per_s * slowed)
            answer_s = decode_s + new_ids / speed.prefill_per_s
            rate = (rate + running / answer_s) / 2
        return running / rate, rate


def _over(value: float, by: float) -> float:
    """The quotient; infinite for what costs nothing."""
    return value / by if by > 0 else inf


def slices_of(needs: Needs) -> int:
    """In how many equal parts a deployment is simulated, each with some whole processes."""
    processes = max(1, round(needs.processes * SLICE / needs.rollouts))
    return 1 if needs.rollouts <= FULL else max(1, needs.processes // processes)


def crossed(limits: Sequence[Limit], above: float, up_to: float) -> list[Limit]:
    """The limits that are reached between two numbers of rollouts."""
    return [limit for limit in limits if above < limit.rollouts <= up_to]


def default_load(case: Case) -> Load:
    """The load of the table: agents with tools, on engines of an assumed speed."""
    speed = Speed(
        prefill_per_s=20_000,
        decode_per_s=5_000,
        half=32,
        during_prefill=0.5,
        running=128,
        capacity_ids=1 << 40,
    )
    return Load(case, speed)


def _simulated(outcome: Outcome, deployment: Deployment, slices: int) -> Simulated:
    return Simulated(
        slices=slices,
        proxy_busy=outcome.proxy_s / outcome.seconds / deployment.processes + deployment.watching,
        redis_busy=outcome.redis_s / outcome.seconds / deployment.shards,
        per_second=outcome.per_second * slices,
        added_p50_ms=1000 * percentile(outcome.added_s, 0.5),
        added_p99_ms=1000 * percentile(outcome.added_s, 0.99),
    )
