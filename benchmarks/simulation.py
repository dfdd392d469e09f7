"""The events of `simulate.py` in virtual time: rollouts, proxy processes, Redis servers and engines.

A core, a proxy process and a Redis server do one thing at a time, in the order of arrival. A turn costs what
was measured (`costs`): the proxy a part before the engine and a part after it, then Redis. A step that finds
its process idle costs more, because the process must wake up. What it does not model: memory that runs out,
prefix caches that miss, packets that are lost, and processes that fail.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.costs import CPU_QUANTITIES, SEED, Case, Costs
from benchmarks.engine_model import EngineModel, Job, Speed

LUMPS = 8
"""Steps in which a stream passes the proxy: a step for every chunk would be too slow to simulate."""
Steps = Generator[simpy.Event, Any, None]


class Server:
    """What does one thing at a time: a core, a process, a Redis server."""

    def __init__(self, environment: simpy.Environment, speed: float = 1.0) -> None:
        """`speed`: the share of a core that it gets."""
        self._environment, self._speed = environment, speed
        self._line = simpy.Resource(environment)
        self.busy_s = 0.0
        """CPU seconds used."""

    def work(self, ms: float, apart_ms: float = 0.0) -> Steps:
        """Wait for the turn, then work for `ms`, and for `apart_ms` more if it was idle."""
        if ms <= 0:
            return
        idle = not self._line.count
        with self._line.request() as place:
            yield place
            cpu_s = (ms + apart_ms if idle else ms) / 1000
            yield self._environment.timeout(cpu_s / self._speed)
            self.busy_s += cpu_s


class Engine:
    """An engine of `engine_model` in virtual time. Prompts need prefill only for their new ids."""

    def __init__(self, environment: simpy.Environment, speed: Speed) -> None:
        self._environment, self._model = environment, EngineModel(speed)
        self._ends: dict[Job, simpy.Event] = {}
        self._version = 0
        self.latest_s = 0.0
        """Time of the answer that ended last."""

    def serve(self, new_ids: int, completion_ids: int) -> simpy.Event:
        """Submit a request; the event is its end."""
        job = Job([], max(1, new_ids), completion_ids)
        end = self._ends[job] = self._environment.event()
        self._advance()
        self._model.submit(self._environment.now, job)
        self._schedule()
        return end

    def _advance(self) -> None:
        for job in self._model.advance(self._environment.now):
            self._ends.pop(job).succeed()

    def _schedule(self) -> None:
        self._version += 1
        change = self._model.next_change()
        if change is not None:
            self._environment.process(self._wake(max(0.0, change - self._environment.now), self._version))

    def _wake(self, after_s: float, version: int) -> Steps:
        yield self._environment.timeout(after_s)
        if version == self._version:  # else the engine changed meanwhile
            self._advance()
            self._schedule()


@dataclass(slots=True)
class Outcome:
    """What a simulation found."""

    seconds: float = 0.0
    """Of virtual time, in which these turns ended."""
    turns: int = 0
    added_s: list[float] = field(default_factory=list)
    """Time of each turn beyond the engine's."""
    proxy_s: float = 0.0
    """CPU seconds of all proxy processes."""
    other_s: float = 0.0
    """CPU seconds of Redis; of a case, of the core with all programs but the proxy."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """How many of everything there are, and the load of their share of a larger deployment."""

    rollouts: int
    processes: int
    shards: int
    engines: int
    background_per_s: float = 0.0
    """Turns per second that other processes, which are not simulated, send to each shard."""
    watching: float = 0.0
    """Share of each process' core that watching the engines takes."""


class _Simulation:
    """Turns of rollouts, with the costs that were measured."""

    def __init__(self, case: Case, costs: Costs) -> None:
        self.case, self.environment, self.outcome = case, simpy.Environment(), Outcome()
        turn = costs.turns[case.way]
        self._work = [{q: turn.of(q, kind) for q in CPU_QUANTITIES} for kind in case.kinds()]
        self._apart = {q: turn.apart.get(q, 0.0) for q in CPU_QUANTITIES}

    def step(self, server: Server, quantity: str, number: int, share: float = 1.0) -> Steps:
        """A share of the work on a turn."""
        return server.work(self._work[number][quantity] * share, self._apart[quantity] * share)

    def turn(self, number: int, proxy: Server, redis: Server, engine: Engine | None) -> Steps:
        """One turn, whose added time is kept.

        Args:
            redis: without an engine it is the core of all programs but the proxy.
        """
        case, now = self.case, self.environment
        lumps = LUMPS if case.stream and (engine is not None or case.service_s) else 0
        # the first and the last step of a stream's turn are as its chunks
        share, begun = 1 / (lumps + 2) if lumps else 0.5, now.now
        if engine is None:
            yield from self.step(redis, "client_ms", number, share)
        yield from self.step(proxy, "proxy_ms", number, share)
        if engine is None:
            yield from self.step(redis, "engine_ms", number, share)
        sent, service_s = now.now, case.service_s if engine is None else engine.latest_s
        for lump in range(lumps):
            after_s = service_s * (lump + 0.5) / lumps
            now.process(self._chunks(number, proxy, redis if engine is None else None, share, after_s))
        if engine is None:
            yield now.timeout(service_s)
        else:
            yield engine.serve(case.opening_ids if number == 0 else case.appended_ids, case.completion_ids)
            service_s = engine.latest_s = now.now - sent
        if engine is None:
            yield from self.step(redis, "engine_ms", number, share)
        yield from self.step(proxy, "proxy_ms", number, share)
        yield from self.step(redis, "redis_ms", number)
        if engine is None:
            yield from self.step(redis, "client_ms", number, share)
        self.outcome.added_s.append(now.now - begun - service_s)

    def _chunks(
        self, number: int, proxy: Server, other: Server | None, share: float, after_s: float
    ) -> Steps:
        """Some chunks on their way, while the engine already makes the next ones."""
        yield self.environment.timeout(after_s)
        if other is not None:
            yield from self.step(other, "engine_ms", number, share)
        yield from self.step(proxy, "proxy_ms", number, share)
        if other is not None:
            yield from self.step(other, "client_ms", number, share)


def simulate_case(case: Case, costs: Costs, others: Sequence[float] = (0.0, 0.0)) -> Outcome:
    """A case of `simulate.py validate`: one proxy on its core; client, engine and Redis on the other.

    Args:
        others: share of the proxy's and of the other core that other programs take. The scheduler takes it
            from an idle core first: a core is slower only if it has too little left.
    """
    alone = _run_case(case, costs, (0.0, 0.0))
    used = (alone.proxy_s / alone.seconds, alone.other_s / alone.seconds)
    taken = [share if share + own > 1 else 0.0 for share, own in zip(others, used, strict=True)]
    return _run_case(case, costs, taken) if any(taken) else alone


def _run_case(case: Case, costs: Costs, others: Sequence[float]) -> Outcome:
    run = _Simulation(case, costs)
    proxy, other = (Server(run.environment, 1 - min(share, 0.9)) for share in others)

    def rollout(number: int) -> Steps:
        thinks = case.thinks(number)
        for turn in range(case.turns):
            yield run.environment.timeout(next(thinks))
            yield from run.turn(turn, proxy, other, None)

    for number in range(case.rollouts):
        run.environment.process(rollout(number))
    run.environment.run()
    run.outcome.seconds, run.outcome.turns = run.environment.now, len(run.outcome.added_s)
    run.outcome.proxy_s, run.outcome.other_s = proxy.busy_s, other.busy_s
    return run.outcome


def simulate_deployment(
    case: Case, costs: Costs, speed: Speed, deployment: Deployment, warm_up_s: float, seconds: float
) -> Outcome:
    """A deployment in its steady state: proxies, shards and engines on cores of their own.

    Rollouts start in the middle of their lives, and one that ends is replaced by a new one.
    """
    run = _Simulation(case, costs)
    now = run.environment
    proxies = [Server(now, 1 - deployment.watching) for _ in range(deployment.processes)]
    shards = [Server(now) for _ in range(deployment.shards)]
    engines = [Engine(now, speed) for _ in range(deployment.engines)]

    def rollouts(number: int) -> Steps:
        draw = random.Random(f"{SEED} rollout {number}")
        first = draw.randrange(case.turns)
        yield now.timeout(draw.uniform(0.0, 2 * case.think_s))
        while True:
            # with sessions, all turns of a rollout are on one shard, and may be on any process
            shard = shards[draw.randrange(len(shards))]
            for turn in range(first, case.turns):
                yield now.timeout(draw.expovariate(1 / case.think_s) if case.think_s else 0.0)
                proxy = proxies[draw.randrange(len(proxies))]
                yield from run.turn(turn, proxy, shard, engines[number % len(engines)])
            first = 0

    def background(shard: Server, draw: random.Random) -> Steps:
        while True:
            yield now.timeout(draw.expovariate(deployment.background_per_s))
            now.process(run.step(shard, "redis_ms", draw.randrange(case.turns)))

    for number in range(deployment.rollouts):
        now.process(rollouts(number))
    for number, shard in enumerate(shards if deployment.background_per_s > 0 else ()):
        now.process(background(shard, random.Random(f"{SEED} background {number}")))
    now.run(until=warm_up_s)
    before = [sum(each.busy_s for each in servers) for servers in (proxies, shards)]
    begun = len(run.outcome.added_s)
    now.run(until=warm_up_s + seconds)
    outcome = run.outcome
    outcome.added_s = outcome.added_s[begun:]
    outcome.turns, outcome.seconds = len(outcome.added_s), seconds
    after = [sum(each.busy_s for each in servers) for servers in (proxies, shards)]
    outcome.proxy_s, outcome.other_s = (end - begin for begin, end in zip(before, after, strict=True))
    return outcome
