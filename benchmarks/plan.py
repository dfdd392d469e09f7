"""How many of everything a number of rollouts needs, and what is too small first: `simulate.py plan`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from benchmarks.costs import Case, Costs
from benchmarks.engine_model import Speed
from benchmarks.report import Part, percentile, progress
from benchmarks.simulation import Deployment, simulate_deployment

ROLLOUTS = (100, 1_000, 10_000, 100_000, 1_000_000)
ENGINE = Speed(20_000, 5_000, half=32, during_prefill=0.5, running=128, capacity_ids=1 << 40)
"""The assumed engine."""
_FULL, _SLICE = 10_000, 4_000
"""The most rollouts that are simulated in full, and about how many of a larger deployment are."""
_WARM_UP_S = _MEASURED_S = 30.0
_PROXY, _REDIS, _ENGINE = 0.7, 0.6, 0.8
"""How full a process' core, a shard's core, and the places of an engine may be in a planned deployment."""
_PARTITIONS, _DEFAULT_PARTITIONS = 4, 16
"""Partitions of the data for each shard of a cluster, and of a cluster whose URL names no number."""
_STORE_MAX_BYTES = float(1 << 30)
"""The default of the setting."""


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


class Planner:
    """Calculates from what a turn costs; `simulate` checks the result."""

    def __init__(
        self, case: Case, speed: Speed, costs: Costs, link_gbit: float = 25.0, watch_interval_s: float = 5.0
    ) -> None:
        self._case, self._speed, self._costs = case, speed, costs
        self._link_gbit, self._watch_interval_s = link_gbit, watch_interval_s
        self._turn, self._kinds = costs.turns[case.way], case.kinds()
        self.engine_s, self.per_engine_s = self._one_engine()
        self.period_s = case.think_s + self.engine_s + self._cpu_ms("proxy_ms", _PROXY) / 1000
        """Seconds from one turn of a rollout to its next one."""

    def _mean(self, quantity: str) -> float:
        return self._turn.mean(quantity, self._kinds)

    def _cpu_ms(self, quantity: str, busy: float) -> float:
        """CPU of a turn in a process that is busy for this share of the time."""
        return self._mean(quantity) + (1 - busy) * self._turn.apart.get(quantity, 0.0)

    def _one_engine(self) -> tuple[float, float]:
        """The time of an answer, and the turns per second, of an engine that is as full as it may be."""
        speed, case = self._speed, self._case
        running = _ENGINE * speed.running
        new_ids = (case.opening_ids + case.appended_ids * (case.turns - 1)) / case.turns
        rate = 0.0
        for _ in range(100):  # the more it prefills, the slower it decodes
            prefilling = min(1.0, rate * new_ids / speed.prefill_per_s)
            slowed = 1 - prefilling * (1 - speed.during_prefill)
            decode_s = case.completion_ids * (running + speed.half) / (speed.decode_per_s * slowed)
            rate = (rate + running / (decode_s + new_ids / speed.prefill_per_s)) / 2
        return running / rate, rate

    def needs(self, rollouts: int) -> Needs:
        """What this number of rollouts needs."""
        rate, search_ms = rollouts / self.period_s, self._costs.search_ms
        engines = ceil(rate / self.per_engine_s)
        watching = engines * self._costs.probe_ms / 1000 / self._watch_interval_s
        redis_ms = self._cpu_ms("redis_ms", _REDIS)
        # a turn without a session is looked up in every partition
        left = _REDIS - rate * search_ms * _PARTITIONS / 1000
        blind = max(1, ceil(rate * (redis_ms - search_ms) / 1000 / left)) if left > 0 else None
        return Needs(
            rollouts=rollouts,
            turns_per_s=rate,
            processes=ceil(rate * self._cpu_ms("proxy_ms", _PROXY) / 1000 / max(0.05, _PROXY - watching)),
            shards=ceil(rate * redis_ms / 1000 / _REDIS),
            shards_without_sessions=blind,
            engines=engines,
            gbit=rate * self._bits() / 1e9,
            memory_gb_per_h=rate * self._mean("memory_bytes") * 3600 / 1e9,
            disk_gb_per_h=rate * self._mean("aof_bytes") * 3600 / 1e9,
            watching=watching,
        )

    def _bits(self) -> float:
        return 8 * sum(map(self._mean, ("client_bytes", "engine_bytes", "redis_bytes")))

    def limits(self) -> list[tuple[str, float, str]]:
        """Each part's name, the rollouts that it carries while there is enough of all others, and the remedy;
        in the order in which a growing number of rollouts reaches them."""
        per_engine, process_ms = self.per_engine_s * self.period_s, self._cpu_ms("proxy_ms", 1.0)
        redis = 1000 / self._cpu_ms("redis_ms", 1.0) * self.period_s
        turn_bytes = self._mean("aof_bytes") * self._case.turns
        look_ups = self._costs.search_ms * _PARTITIONS
        watched = _over(1000 * self._watch_interval_s, self._costs.probe_ms) * per_engine / 2
        found = [
            ("one engine", per_engine / _ENGINE, "more engines"),
            (
                "one proxy process",
                1000 / process_ms * self.period_s,
                "more processes: `workers`, then replicas of the proxy",
            ),
            (
                "the default `store_max_bytes`",
                _over(_STORE_MAX_BYTES, turn_bytes),
                "set it to what the rollouts take: sessions in use are evicted",
            ),
            ("one Redis server", redis, "a cluster, with sessions named by the clients"),
            (
                f"a cluster's {_DEFAULT_PARTITIONS} partitions",
                _DEFAULT_PARTITIONS * redis,
                "name a larger number in the store's URL before it is used first: `partitions`",
            ),
            (
                f"one machine's {self._link_gbit:g} Gbit/s",
                _over(self._link_gbit * 1e9, self._bits()) * self.period_s,
                "proxies on more machines",
            ),
            (
                "look-ups without session names",
                _over(1000, look_ups) * self.period_s,
                "name sessions: every partition answers every look-up without a name",
            ),
            (
                "each process watches each engine: half of its core",
                watched,
                "split into cells, each with its own engines; or a longer `watch_interval_s`",
            ),
        ]
        return sorted(found, key=lambda limit: limit[1])

    def simulate(self, needs: Needs, slices: int) -> list[str]:
        """Simulate one of `slices` equal parts of a deployment; returns a row of the table.

        The load of the other parts on the part's Redis shard comes in at random.
        """
        shards = max(1, round(needs.shards / slices))
        deployment = Deployment(
            rollouts=round(needs.rollouts / slices),
            processes=max(1, round(needs.processes / slices)),
            shards=shards,
            engines=max(1, round(needs.engines / slices)),
            background_per_s=max(0.0, needs.turns_per_s / needs.shards - needs.turns_per_s / slices / shards),
            watching=needs.watching,
        )
        progress(f"plan: simulate {needs.rollouts:,} rollouts, 1 of {slices} parts")
        args = (self._case, self._costs, self._speed, deployment, _WARM_UP_S, _MEASURED_S)
        outcome = simulate_deployment(*args)
        return [
            f"{needs.rollouts:,} rollouts",
            "a whole" if slices == 1 else f"1 of {slices:,} parts",
            f"{outcome.turns / outcome.seconds * slices:,.0f}",
            f"{needs.turns_per_s:,.0f}",
            f"{outcome.proxy_s / outcome.seconds / deployment.processes + deployment.watching:.0%}",
            f"{outcome.other_s / outcome.seconds / deployment.shards:.0%}",
            *(f"{1000 * percentile(outcome.added_s, share):.1f} ms" for share in (0.5, 0.99)),
        ]

    def tables(self, rollouts: Sequence[int]) -> list[Part]:
        """What each number of rollouts needs, the limits, and the simulation of each; the largest one that is
        simulated in full also in parts."""
        limits = self.limits()
        head = ["concurrent rollouts", "turns/s", "proxy processes", "Redis shards"]
        head += ["the same, no session names", "engines", "Gbit/s", "Redis GB/h", "disk GB/h"]
        rows = [[*head, "first limits above the row before"]]
        checks = [
            ["simulated", "as", "turns/s", "planned", "proxy busy", "Redis busy", "added p50", "added p99"]
        ]
        above = 0.0
        for number in rollouts:
            needs = self.needs(number)
            blind = needs.shards_without_sessions
            crossed = [f"{name} ({_round(at)})" for name, at, _ in limits if above < at <= number]
            counts = [f"{needs.turns_per_s:,.0f}", f"{needs.processes:,}", f"{needs.shards:,}"]
            counts += [
                "impossible" if blind is None else f"{blind:,}",
                f"{needs.engines:,}",
                f"{needs.gbit:,.2f}",
            ]
            counts += [
                f"{needs.memory_gb_per_h:,.1f}",
                f"{needs.disk_gb_per_h:,.1f}",
                "; ".join(crossed) or "-",
            ]
            rows.append([f"{number:,}", *counts])
            checks.append(self.simulate(needs, slices_of(needs)))
            if number == _FULL and needs.processes > 1:
                checks.append(self.simulate(needs, needs.processes))
            above = number
        reached = [["limit", "at concurrent rollouts", "then"]]
        return [rows, reached + [[name, _round(at), remedy] for name, at, remedy in limits], checks]


def slices_of(needs: Needs) -> int:
    """In how many equal parts a deployment is simulated, each with some whole processes."""
    processes = max(1, round(needs.processes * _SLICE / needs.rollouts))
    return 1 if needs.rollouts <= _FULL else max(1, needs.processes // processes)


def _over(value: float, by: float) -> float:
    """The quotient; infinite for what costs nothing."""
    return value / by if by > 0 else inf


def _round(value: float) -> str:
    """Two significant digits: more would claim a precision that an extrapolation does not have."""
    return "never" if value == inf else f"{float(f'{value:.1e}'):,.0f}"
