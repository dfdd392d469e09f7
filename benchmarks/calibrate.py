"""The measurements of `simulate.py`: what turns cost on this machine, and small cases in reality.

The proxy has a core of its own; the client, Redis and an engine that only waits share the other one.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import uvloop
from redis import Redis

from benchmarks.client import BadResponse, Connection, Rollout, Step, Tally
from benchmarks.costs import (
    CPU_QUANTITIES,
    QUANTITIES,
    REFERENCE,
    Case,
    Costs,
    Curve,
    Points,
    TurnCosts,
    interpolate,
    rising,
)
from benchmarks.loads import NUMBER
from benchmarks.processes import (
    Cores,
    Running,
    core_busy_s,
    engines,
    get_json,
    pinned,
    proxy,
    redis_server,
    scratch_folder,
)
from benchmarks.report import Part, machine, percentile, progress, verdict
from benchmarks.simulation import Outcome, simulate_case
from benchmarks.texts import Answer, Texts
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.history.store import Limits
from proxy.stores.urls import make_store
from tokenization import ChatTokenizer

LENGTHS = (1_000, 8_000, 32_000)
"""Ids of the openings."""
_LONG = 800
"""Sampled ids of the long answers."""
_WAYS = (("Redis", False), ("Redis", True), ("memory", False))
_BUSY: dict[bool, dict[str, Any]] = {
    False: {"service_s": 0.03, "think_s": 0.05},
    True: {"service_s": 0.2, "think_s": 0.2},
}
"""Times so short that 64 rollouts keep the proxy's core busy; without pauses they would move in step."""
_APART: dict[bool, dict[str, Any]] = {
    False: {"turns": 9, "service_s": 0.1, "think_s": 0.02},
    True: {"turns": 3, "service_s": 1.5, "think_s": 0.3},
}
"""Of 6 rollouts; the proxy's core is about a tenth busy."""
_WATCHED, _WATCH_S = 64, 0.5
"""Engines, and seconds between two checks of one."""
_SEARCHES, _SEARCH_KEYS = 500, 3
_AOF = ("--appendonly", "yes", "--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0")
_AIM = 0.2
"""Aim: the simulated value differs by at most this share from the measured one."""
CASES = (
    Case("10 rollouts", 10, 16),
    Case("40 rollouts", 40, 10),
    Case("100 rollouts", 100, 8),
    Case("100 rollouts, slow", 100, 6, think_s=0.5, service_s=0.3),
    Case("40 rollouts, 16k ids", 40, 8, 16_000),
    Case("40 rollouts, long answers", 40, 8, appended_ids=200, completion_ids=500),
    Case("10 rollouts, streamed", 10, 5, stream=True, think_s=0.2, service_s=1.0),
    Case("40 rollouts, streamed", 40, 5, stream=True, think_s=0.2, service_s=1.0),
    Case("40 rollouts, memory", 40, 10, store="memory"),
)
"""What is simulated and measured; none is part of the measurement of the costs."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What some turns cost in reality, all of one turn on average."""

    tally: Tally
    used: dict[str, float]
    """By the names in `QUANTITIES`, and `scripts`: scripts that the proxy called in Redis."""
    others: tuple[float, float]
    """Share of the proxy's core and of the other core that other programs used."""


class _Bench:
    """The engine, Redis and a proxy in front of each store."""

    def __init__(self, stack: ExitStack, folder: Path, checkpoint: Path, cases: Sequence[Case]) -> None:
        self._cores, self._folder, self._count = Cores.pick(), folder, 0
        tokenizer = ChatTokenizer.load(checkpoint)
        texts = Texts(tokenizer)
        self._openings = {case.name: texts.history(case.opening_ids, mark=f"{NUMBER}: ") for case in cases}
        self._answers = {
            _slug(case): texts.answer(case.completion_ids, tokenizer.render(self._openings[case.name]))
            for case in cases
        }
        self._text = {case.name: texts.text(case.appended_ids - 20) for case in cases}
        self.redis_url = stack.enter_context(redis_server(self._cores.engine, folder, *_AOF))
        self._redis: Any = Redis.from_url(self.redis_url)
        (self._engine,) = stack.enter_context(engines(self._cores.engine, checkpoint, self._answers))
        self._proxies = {
            store: stack.enter_context(
                proxy(
                    self._cores.proxy,
                    [self._engine],
                    folder / f"{store}.log",
                    *("--store-max-bytes", str(8 << 30)),
                    store=url,
                )
            )
            for store, url in (("Redis", self.redis_url), ("memory", "memory:"))
        }
        stack.enter_context(pinned(self._cores.client))

    def rollouts(self, case: Case) -> list[Rollout]:
        """New rollouts of a case; the engine now gives its answers."""
        for path in (f"/use/{_slug(case)}", f"/service/{case.service_s!r}"):
            if get_json(self._engine, path) is None:
                raise BadResponse(f"the engine does not know {path}")
        self._count += case.rollouts
        return [self._rollout(case, self._answers[_slug(case)], number) for number in range(case.rollouts)]

    def _rollout(self, case: Case, answer: Answer, number: int) -> Rollout:
        name = str(1_000_000 + self._count - number)
        thinks = zip(case.thinks(number), range(case.turns), strict=False)
        steps = [
            Step(think_s, f"{name}.{1_000_000 + turn}: {self._text[case.name]}", case.completion_ids)
            for think_s, turn in thinks
        ]
        opening = [{**m, "content": m["content"].replace(NUMBER, name)} for m in self._openings[case.name]]
        return Rollout(
            opening,
            steps,
            session=f"rollout-{name}",
            answer=msgspec.json.encode(answer.message),
            stream=case.stream,
        )

    def measure(self, case: Case, rollouts: Sequence[Rollout], turns: int | None = None) -> Measured:
        """Take turns of all rollouts, None for all that are left, and find out what each cost.

        Raises:
            BadResponse: a response is an error.
        """
        running, tally = self._proxies[case.store], Tally()
        running.rest()
        before, busy = self._counters(running), self._busy_s()
        try:
            uvloop.run(_take(running.port, rollouts, tally, turns))
        except BadResponse as error:
            log = (self._folder / f"{case.store}.log").read_text()[-4000:]
            raise BadResponse(f"{case.name}: {error}\nThe proxy's log:\n{log}") from error
        busy_after, count = self._busy_s(), len(tally.latencies_s)
        running.rest()  # what is recorded after the answer counts too
        after = self._counters(running)
        used = {name: (after[name] - before[name]) / count for name in after}
        used["client_ms"] = 1000 * tally.cpu_s / count
        used["client_bytes"] = (tally.sent_bytes + tally.received_bytes) / count
        ours = (used["proxy_ms"], used["client_ms"] + used["engine_ms"] + used["redis_ms"])
        others = [
            max(0.0, end - begin - ms * count / 1000) / tally.seconds
            for begin, end, ms in zip(busy, busy_after, ours, strict=True)
        ]
        return Measured(tally, used, (others[0], others[1]))

    def search_ms(self) -> float:
        """CPU milliseconds of Redis to look up a conversation by the keys of its last messages."""
        before = self._redis_ms()
        asyncio.run(_search(self.redis_url))
        return (self._redis_ms() - before) / _SEARCHES

    def _redis_ms(self) -> float:
        used = self._redis.info("cpu")
        return 1000 * float(used["used_cpu_user"] + used["used_cpu_sys"])

    def _busy_s(self) -> tuple[float, float]:
        """CPU seconds of all programs on the proxy's core and on the other core."""
        return core_busy_s(self._cores.proxy), core_busy_s(self._cores.engine)

    def _counters(self, running: Running) -> dict[str, float]:
        engine, redis = get_json(self._engine, "/totals"), self._redis.info("all")
        return {
            "proxy_ms": 1000 * running.cpu_s(),
            "engine_ms": 1000 * engine["cpu_s"],
            "engine_bytes": engine["read"] + engine["written"],
            "redis_ms": self._redis_ms(),
            "scripts": redis.get("cmdstat_evalsha", {}).get("calls", 0),
            "redis_bytes": redis["total_net_input_bytes"] + redis["total_net_output_bytes"],
            "memory_bytes": redis["used_memory"],
            "aof_bytes": redis.get("aof_current_size", 0),
        }


async def _take(port: int, rollouts: Sequence[Rollout], tally: Tally, turns: int | None) -> None:
    opened = [await Connection.connect(port) for _ in rollouts]
    cpu_s, start = time.process_time(), time.perf_counter()
    try:
        pairs = zip(rollouts, opened, strict=True)
        await asyncio.gather(*(rollout.take(line, tally, turns) for rollout, line in pairs))
        tally.seconds, tally.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    finally:
        for connection in opened:
            connection.close()


async def _search(url: str) -> None:
    store = make_store(url, Limits())
    try:
        for number in range(_SEARCHES):
            keys = [bytes([n]) * 8 + number.to_bytes(8, "big") for n in range(_SEARCH_KEYS)]
            await store.find(keys)
    finally:
        await store.aclose()


def _slug(case: Case) -> str:
    return re.sub(r"\W+", "-", case.name)


def _cells() -> dict[tuple[str, str], Case]:
    """What is measured for the costs, by the way of `Costs.turns` and a name: a length with the reference
    answer, `long` for a long one, `apart` for pauses between the steps."""
    cells = {}
    for store, stream in _WAYS:
        busy = Case("", 64, 6, stream=stream, store=store, **_BUSY[stream])
        every = {str(length): replace(busy, opening_ids=length) for length in LENGTHS}
        every["long"] = replace(every["1000"], completion_ids=_LONG)
        every["apart"] = replace(every["1000"], rollouts=6, **_APART[stream])
        for name, case in every.items():
            cells[case.way, name] = replace(case, name=f"{case.way} {name}")
    return cells


def measure(rounds: int, compared: Sequence[Case], most_turns: int = 100) -> tuple[Costs, list["Pair"]]:
    """Measure the costs and, alternately, cases to compare with the simulation, which may be none.

    Raises:
        StartError: a process does not start, or Redis is not installed.
        BadResponse: a response is an error.
    """
    checkpoint = ensure_checkpoint()
    cells = {key: replace(case, turns=min(case.turns, most_turns)) for key, case in _cells().items()}
    pairs = [Pair(replace(case, turns=min(case.turns, most_turns)), [], []) for case in compared]
    samples: dict[tuple[str, str, bool], list[Measured]] = defaultdict(list)
    with scratch_folder() as folder:
        searches = []
        with ExitStack() as stack:
            bench = _Bench(stack, folder, checkpoint, [*cells.values(), *(pair.case for pair in pairs)])
            for number in range(rounds):
                progress(f"calibrate: round {number + 1} of {rounds}, {len(cells)} measurements")
                for (way, name), case in cells.items():
                    rollouts = bench.rollouts(case)
                    samples[way, name, True].append(bench.measure(case, rollouts, 1))
                    samples[way, name, False].append(bench.measure(case, rollouts))
                searches.append(bench.search_ms())
                progress(f"validate: round {number + 1} of {rounds}, {len(pairs)} cases")
                for pair in pairs:
                    pair.measured.append(bench.measure(pair.case, bench.rollouts(pair.case)))
        probe_ms = _probe_ms(checkpoint, folder)
    later = [each for (_, _, first), found in samples.items() if not first for each in found]
    redis = [
        each
        for (way, _, first), found in samples.items()
        if way != "memory whole" and not first
        for each in found
    ]
    costs = Costs(
        machine(),
        {way: _turn_costs(way, cells, samples) for way in dict.fromkeys(way for way, _ in cells)},
        search_ms=median(searches),
        probe_ms=probe_ms,
        scripts=median(each.used["scripts"] for each in redis),
        others=median(each.others[0] for each in later),
    )
    for pair in pairs:
        pair.simulated.extend(simulate_case(pair.case, costs, each.others) for each in pair.measured)
    return costs, pairs


def _turn_costs(
    way: str, cells: dict[tuple[str, str], Case], samples: dict[tuple[str, str, bool], list[Measured]]
) -> TurnCosts:
    def medians(name: str, quantity: str, first: bool = False) -> float:
        return max(0.0, median(each.used[quantity] for each in samples[way, name, first]))

    def later_ids(name: str) -> float:
        return mean(kind.prompt_ids for kind in cells[way, name].kinds()[1:])

    def points(quantity: str, first: bool) -> Points:
        names = [str(length) for length in LENGTHS]
        return rising([(float(n) if first else later_ids(n), medians(n, quantity, first)) for n in names])

    curves, apart = {}, {}
    for quantity in QUANTITIES:
        first, later = points(quantity, True), points(quantity, False)
        # the prompts of the rollouts with long answers grow faster
        slope = (medians("long", quantity) - interpolate(later, later_ids("long"))) / (_LONG - REFERENCE)
        curves[quantity] = Curve(first, later, max(0.0, slope))
    seconds = [each.tally.seconds / len(each.tally.latencies_s) for each in samples[way, "apart", False]]
    idle = 1 - median(each.used["proxy_ms"] for each in samples[way, "apart", False]) / 1000 / median(seconds)
    for quantity in CPU_QUANTITIES:
        busy = interpolate(curves[quantity].later, later_ids("apart"))
        apart[quantity] = max(0.0, medians("apart", quantity) - busy) / max(0.1, idle)
    return TurnCosts(curves, apart)


def _probe_ms(checkpoint: Path, folder: Path, seconds: float = 3.0) -> float:
    """CPU milliseconds of a proxy at rest to check one of its engines: with 64 minus with one of them."""
    progress("calibrate: what it costs a proxy to watch its engines")
    cores, used = Cores.pick(), []
    fleet = ("--replicas", str(_WATCHED), "--slow", "0")
    with pinned(cores.client), engines(cores.engine, checkpoint, None, *fleet) as ports:
        for watched in (1, _WATCHED):
            log, flags = folder / f"watch-{watched}.log", ("--watch-interval-s", str(_WATCH_S))
            with proxy(cores.proxy, ports[:watched], log, *flags, store="memory:") as running:
                running.rest()
                start, cpu_s = time.perf_counter(), running.cpu_s()
                time.sleep(seconds)
                used.append((running.cpu_s() - cpu_s) / (time.perf_counter() - start))
    return 1000 * max(0.0, used[1] - used[0]) * _WATCH_S / (_WATCHED - 1)


@dataclass(frozen=True, slots=True)
class Pair:
    """All rounds of a case, in reality and simulated."""

    case: Case
    measured: list[Measured]
    simulated: list[Outcome]

    def values(self) -> dict[str, tuple[float, float]]:
        """For each quantity, the median of the measured rounds and of the simulated ones."""
        tallies, service_s = [each.tally for each in self.measured], self.case.service_s
        values = {
            "requests/s": (
                median(len(tally.latencies_s) / tally.seconds for tally in tallies),
                median(outcome.turns / outcome.seconds for outcome in self.simulated),
            ),
            "makespan": (median(t.seconds for t in tallies), median(o.seconds for o in self.simulated)),
            "CPU ms": (
                median(each.used["proxy_ms"] for each in self.measured),
                median(1000 * outcome.proxy_s / outcome.turns for outcome in self.simulated),
            ),
        }
        for name, share in (("added p50", 0.5), ("added p99", 0.99)):
            values[name] = (
                median(1000 * (percentile(tally.latencies_s, share) - service_s) for tally in tallies),
                median(1000 * percentile(outcome.added_s, share) for outcome in self.simulated),
            )
        return values

    @property
    def met(self) -> bool:
        """Whether rate, makespan and CPU are within the aim."""
        checked = list(self.values().values())[:3]
        return all(abs(simulated / real - 1) <= _AIM for real, simulated in checked)


def validation_parts(pairs: Sequence[Pair]) -> list[Part]:
    """The comparison, and how many cases meet the aim."""
    names = list(pairs[0].values())
    heads = [head for name in names for head in (name, "ratio")]
    rows = [["measured / simulated", *heads, "others", f"<= {_AIM:.0%}"]]
    for pair in pairs:
        cells = []
        for name, (real, simulated) in pair.values().items():
            form = "{:,.0f}" if name == "requests/s" else "{:.2f}" if real < 10 else "{:.0f}"
            unit = {"makespan": " s", "requests/s": "", "CPU ms": ""}.get(name, " ms")
            cells.append(f"{form.format(real)} / {form.format(simulated)}{unit}")
            cells.append(f"{simulated / real:.2f}x" if real > 0 else "-")
        others = median(each.others[0] for each in pair.measured)
        rows.append([pair.case.name, *cells, f"{others:.0%}", verdict(pair.met)])
    away = {name: [abs(b / a - 1) for a, b in (pair.values()[name] for pair in pairs)] for name in names}
    means = ", ".join(f"{name} {mean(each):.0%} (worst {max(each):.0%})" for name, each in away.items())
    reached = sum(pair.met for pair in pairs)
    return [rows, f"{reached} of {len(pairs)} cases within {_AIM:.0%}. Mean difference: {means}."]
