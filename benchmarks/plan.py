"""Plan a fleet: how many of everything a number of concurrent rollouts needs, and what is too small first.

It calculates with what a turn costs (`scale_costs.json`) and with an assumed speed of the engines. A cost was
measured for the first turn of a rollout and for later ones, at some lengths of the prompt. Between two
lengths it is interpolated, and beyond them extrapolated, in a straight line. Each further sampled or appended
id costs the same.
"""

import argparse
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from benchmarks.report import Part, as_text

ROLLOUTS = (100, 1_000, 10_000, 100_000, 1_000_000)
COSTS = Path(__file__).resolve().parent / "scale_costs.json"
_SAMPLED, _APPENDED = 200, 400
"""Sampled ids of an answer, and ids of the message before it, when the costs were measured."""
_PROXY, _REDIS, _ENGINE = 0.7, 0.6, 0.8
"""How full a process' core, a shard's core, and the places of an engine may be in a planned fleet."""
_LIST_MS = 0.1
"""CPU of Redis for the calls of a turn to the list of sessions, which one shard of a cluster holds."""
_STORE_MAX_BYTES = float(1 << 30)
"""The default of the setting."""
Points = tuple[tuple[float, float], ...]
"""(ids of the prompt, quantity), by growing ids."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is planned. Each field is an option of the command line."""

    turns: int = _option(10, "of a rollout")
    opening: int = _option(2_000, "ids of the first prompt")
    appended: int = _option(_APPENDED, "ids of a tool's result, which each further turn appends")
    completion: int = _option(_SAMPLED, "sampled ids of an answer")
    think_s: float = _option(5.0, "mean time of a tool before each turn")
    stream: bool = _option(False, "answers are streamed, each id in a chunk")
    prefill_per_s: float = _option(20_000.0, "ids of prompts that an engine prefills per second")
    decode_per_s: float = _option(5_000.0, "ids that an engine samples per second when it is full")
    running: int = _option(128, "requests that run at the same time in an engine")
    cpu_factor: float = _option(1.0, "CPU time of a turn on your cores, relative to the measured one")
    link_gbit: float = _option(25.0, "network of one machine")
    watch_interval_s: float = _option(5.0, "the proxy's setting")


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a turn by the ids of its prompt, in the first turn of a rollout and in later ones."""

    first: Points
    later: Points
    per_completion_id: float = 0.0
    if_idle: float = 0.0
    """More if each of its steps arrives at an idle event loop, which must wake up."""

    def of(self, prompt_ids: float, plan: Assumptions, *, first: bool) -> float:
        """The quantity for a turn; never negative."""
        more = (plan.completion - _SAMPLED) * self.per_completion_id
        if not first:
            # a first turn's prompt is all new, so what it costs more per id is the cost of a new id
            more += (plan.appended - _APPENDED) * max(0.0, _slope(self.first) - _slope(self.later))
        return max(0.0, interpolate(self.first if first else self.later, prompt_ids) + more)

    def mean(self, plan: Assumptions) -> float:
        """Of a turn, on average over a rollout."""
        grown = plan.appended + plan.completion
        return mean(self.of(plan.opening + n * grown, plan, first=n == 0) for n in range(plan.turns))


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that was measured, with Redis as the store."""

    whole: dict[str, Curve]
    """What a turn uses: CPU milliseconds of proxy and Redis; bytes on the network, in Redis and on disk."""
    streamed: dict[str, Curve]
    search_ms: float
    """CPU of Redis for one look-up of a conversation."""
    probe_ms: float
    """CPU of a proxy process to check one engine once."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a number of rollouts needs."""

    turns_per_s: float
    processes: int
    shards: int
    engines: int
    gbit: float
    """Of the proxies: from and to clients, engines and Redis."""
    memory_gb_per_h: float
    """By which Redis grows while it evicts nothing."""
    disk_gb_per_h: float
    """Written to the append-only files."""


class Planner:
    """Calculates needs and limits."""

    def __init__(self, plan: Assumptions, costs: Costs) -> None:
        self._plan, self._curves = plan, costs.streamed if plan.stream else costs.whole
        self._probe_ms = costs.probe_ms * plan.cpu_factor
        engine_s, self._per_engine_s = self._one_engine()
        self._period_s = plan.think_s + engine_s + self._cpu_ms("proxy_ms", _PROXY) / 1000
        self._bits = 8 * sum(map(self._mean, ("client_bytes", "engine_bytes", "redis_bytes")))

    def _mean(self, quantity: str) -> float:
        return self._curves[quantity].mean(self._plan)

    def _cpu_ms(self, quantity: str, busy: float) -> float:
        """CPU of a turn in a process that is busy for this share of the time."""
        return self._plan.cpu_factor * (self._mean(quantity) + (1 - busy) * self._curves[quantity].if_idle)

    def _one_engine(self) -> tuple[float, float]:
        """The time of an answer, and the turns per second, of an engine that is as full as it may be.

        32 sequences have half of its decoding speed; while it prefills, it decodes half as fast.
        """
        plan, running = self._plan, _ENGINE * self._plan.running
        new_ids = (plan.opening + plan.appended * (plan.turns - 1)) / plan.turns
        rate = 0.0
        for _ in range(100):  # the more it prefills, the slower it decodes
            prefilling = min(1.0, rate * new_ids / plan.prefill_per_s)
            slowed = plan.decode_per_s * (1 - prefilling / 2)
            decode_s = plan.completion * (running + 32) / slowed
            rate = (rate + running / (decode_s + new_ids / plan.prefill_per_s)) / 2
        return running / rate, rate

    def needs(self, rollouts: int) -> Needs:
        """What this number of rollouts needs."""
        rate = rollouts / self._period_s
        engines = ceil(rate / self._per_engine_s)
        # each process watches each engine
        watching = engines * self._probe_ms / 1000 / self._plan.watch_interval_s
        redis_ms = self._cpu_ms("redis_ms", _REDIS)
        return Needs(
            turns_per_s=rate,
            processes=ceil(rate * self._cpu_ms("proxy_ms", _PROXY) / 1000 / max(0.05, _PROXY - watching)),
            shards=ceil(rate * redis_ms / 1000 / _REDIS),
            engines=engines,
            gbit=rate * self._bits / 1e9,
            memory_gb_per_h=rate * self._mean("memory_bytes") * 3600 / 1e9,
            disk_gb_per_h=rate * self._mean("aof_bytes") * 3600 / 1e9,
        )

    def limits(self) -> list[tuple[str, float, str]]:
        """Each part's name, the rollouts that it carries while there is enough of all others, and the remedy;
        in the order in which a growing number of rollouts reaches them."""
        plan, period_s = self._plan, self._period_s
        engine = self._per_engine_s * period_s / _ENGINE
        process = 1000 / self._cpu_ms("proxy_ms", 1.0) * period_s
        stored = _STORE_MAX_BYTES / (self._mean("aof_bytes") * plan.turns)
        redis = 1000 / self._cpu_ms("redis_ms", 1.0) * period_s
        network = plan.link_gbit * 1e9 / self._bits * period_s
        listed = 1000 / (_LIST_MS * plan.cpu_factor) * period_s
        watched = 1000 * plan.watch_interval_s / self._probe_ms * self._per_engine_s * period_s / 2
        link = f"{plan.link_gbit:g} Gbit/s"
        cells = "split into cells, each with its own engines; or a longer `watch_interval_s`"
        found = [
            ("one engine", engine, "more engines"),
            ("one proxy process", process, "more processes: `workers`, then replicas of the proxy"),
            (
                "the default `store_max_bytes`",
                stored,
                "set it to what the rollouts take: sessions in use are evicted",
            ),
            ("one Redis server", redis, "a cluster"),
            (f"one machine's {link}", network, "proxies on more machines"),
            ("a cluster's list of sessions", listed, "split into cells, each with its own store"),
            ("each process watches each engine: half of its core", watched, cells),
        ]
        return sorted(found, key=lambda limit: limit[1])

    def tables(self, rollouts: Sequence[int]) -> list[Part]:
        """What each number of rollouts needs, and all limits."""
        limits, above = self.limits(), 0.0
        head = ["concurrent rollouts", "turns/s", "proxy processes", "Redis shards"]
        head += ["engines", "Gbit/s", "Redis GB/h", "disk GB/h"]
        rows = [[*head, "first limits above the row before"]]
        for number in rollouts:
            needs = self.needs(number)
            crossed = [f"{name} ({_round(at)})" for name, at, _ in limits if above < at <= number]
            counts = [f"{needs.turns_per_s:,.0f}", f"{needs.processes:,}", f"{needs.shards:,}"]
            counts.append(f"{needs.engines:,}")
            sizes = [f"{needs.gbit:,.2f}", f"{needs.memory_gb_per_h:,.1f}", f"{needs.disk_gb_per_h:,.1f}"]
            rows.append([f"{number:,}", *counts, *sizes, "; ".join(crossed) or "-"])
            above = number
        reached = [["limit", "at concurrent rollouts", "then"]]
        return [rows, reached + [[name, _round(at), remedy] for name, at, remedy in limits]]


def interpolate(points: Points, at: float) -> float:
    """The value of straight lines through the points; the outer lines go on.

    With points (1, 10) and (3, 30), the value at 2 is 20, and at 4 it is 40.
    """
    upper = min(max(bisect_left([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _slope(points: Points) -> float:
    (x0, y0), (x1, y1) = points[0], points[-1]
    return (y1 - y0) / (x1 - x0)


def _round(value: float) -> str:
    """Two significant digits: more would claim a precision that an extrapolation does not have."""
    return f"{float(f'{value:.1e}'):,.0f}"


def read_costs() -> Costs:
    """What was measured."""
    return msgspec.json.decode(COSTS.read_bytes(), type=Costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.plan",
        description=(
            "Calculate what rollouts need, from what a turn costs and from your engine's speed. "
            "docs/scale.md explains the tables."
        ),
    )
    parser.add_argument("--rollouts", type=_positive(int), nargs="+", default=ROLLOUTS, metavar="N")
    for each in fields(Assumptions):
        flag, text = f"--{each.name.replace('_', '-')}", f"{each.metadata['help']} ({each.default})"
        if each.default is False:
            parser.add_argument(flag, action="store_true", help=each.metadata["help"])
        else:
            kind = _positive(type(each.default))
            parser.add_argument(flag, type=kind, default=each.default, metavar="N", help=text)
    options = vars(parser.parse_args(argv))
    rollouts = options.pop("rollouts")
    print(as_text(Planner(Assumptions(**options), read_costs()).tables(rollouts)))
    return 0


def _positive(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if (value := kind(text)) <= 0:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
