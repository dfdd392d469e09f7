"""The events of `simulate.py` in virtual time: rollouts, proxy processes, Redis servers and engines.

A core, a proxy process and a Redis server do one thing at a time, in the order of arrival. A turn costs what
was measured (`scale_costs`): the proxy a part before the engine and a part after it, then Redis. A step that
finds its process idle costs more, because the process must wake up. What it does not model: memory that runs
out, prefix caches that miss, packets that are lost, and processes that fail.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.fleet_model import EngineModel, Job, Speed
from benchmarks.scale_case import SEED, Case
from benchmarks.scale_costs import CPU_QUANTITIES, Costs, TurnCosts, TurnKind

LUMPS = 8
"""Steps in which a stream passes the proxy: a step for every chunk would be too slow to simulate."""
BEFORE = 0.5
"""Share of the proxy's work on a turn that is done before the engine has the request."""

Steps = Generator[simpy.Event, Any, None]


class Server:
    """What does one thing at a time: a core, a process, a Redis server."""

    def __init__(self, environment: simpy.Environment, speed: float = 1.0) -> None:
        """`speed`: the share of a core that it gets."""
        self._environment, self._speed = environment, speed
        self._line = simpy.Resource(environment)
        self.busy_s = 0.0
        """CPU seconds used."""
        self.served = 0

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
            self.served += 1


class Engine:
    """An engine of `fleet_model` in virtual time. Prompts need prefill only for their new ids."""

    def __init__(self, environment: simpy.Environment, speed: Speed) -> None:
        self._environment, self.model = environment, EngineModel(speed)
        self._ends: dict[Job, simpy.Event] = {}
        self._version = 0
        self.latest_s = 0.0
        """Time of the answer that ended last."""

    def serve(self, new_ids: int, completion_ids: int) -> simpy.Event:
        """Submit a request; the event is its end."""
        job = Job([], max(1, new_ids), completion_ids)
        end = self._ends[job] = self._environment.event()
        self._advance()
        self.model.submit(self._environment.now, job)
        self._schedule()
        return end

    def _advance(self) -> None:
        for job in self.model.advance(self._environment.now):
            self._ends.pop(job).succeed()

    def _schedule(self) -> None:
        self._version += 1
        change = self.model.next_change()
        if change is not None:
            self._environment.process(self._wake(max(0.0, change - self._environment.now), self._version))

    def _wake(self, after_s: float, version: int) -> Steps:
        yield self._environment.timeout(after_s)
        if version == self._version:  # else the engine changed meanwhile
            self._advance()
            self._schedule()


@dataclass(frozen=True, slots=True)
class TurnWork:
    """What one turn costs, in milliseconds of CPU."""

    proxy: float
    client: float
    engine: float
    redis: float

    @classmethod
    def of(cls, costs: TurnCosts, turn: TurnKind) -> "TurnWork":
        """The costs of a turn."""
        return cls(*(costs.of(quantity, turn) for quantity in CPU_QUANTITIES))


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
    """CPU seconds of the core with all other programs of a case."""
    redis_s: float = 0.0

    @property
    def per_second(self) -> float:
        """Turns per second."""
        return self.turns / self.seconds

    @property
    def proxy_ms(self) -> float:
        """CPU milliseconds of the proxy per turn."""
        return 1000 * self.proxy_s / max(1, self.turns)


class CaseSimulation:
    """A case of `simulate.py validate`: one proxy on its core; client, engine and Redis on the other."""

    def __init__(self, case: Case, costs: Costs, others: Sequence[float] = (0.0, 0.0)) -> None:
        """`others`: share of the proxy's and of the other core that other programs take from it."""
        self._case, self._costs = case, costs.turn(case.store, case.stream)
        self._environment = simpy.Environment()
        self._proxy, self._other = (Server(self._environment, 1 - min(share, 0.9)) for share in others)
        self._apart = {name: self._costs.apart.get(name, 0.0) for name in CPU_QUANTITIES}
        self._work = [
            TurnWork.of(
                self._costs,
                TurnKind(case.prompt_ids(n), case.appended_ids, case.completion_ids, n == 0),
            )
            for n in range(case.turns)
        ]
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run all rollouts from their first request to their last response."""
        for number in range(self._case.rollouts):
            self._environment.process(self._rollout(number))
        self._environment.run()
        outcome = self._outcome
        outcome.seconds, outcome.proxy_s = self._environment.now, self._proxy.busy_s
        outcome.other_s = self._other.busy_s
        return outcome

    @classmethod
    def beside(cls, case: Case, costs: Costs, others: Sequence[float]) -> Outcome:
        """Run a case while other programs take a share of each core.

        The scheduler takes that from an idle core first: a core is slower only if it has too little left.
        """
        alone = cls(case, costs).run()
        used = (alone.proxy_s / alone.seconds, alone.other_s / alone.seconds)
        taken = [share if share + own > 1 else 0.0 for share, own in zip(others, used, strict=True)]
        return cls(case, costs, taken).run() if any(taken) else alone

    def _rollout(self, number: int) -> Steps:
        thinks = self._case.thinks(number)
        for work in self._work:
            yield self._environment.timeout(next(thinks))
            begun = self._environment.now
            yield from self._turn(work)
            self._outcome.added_s.append(self._environment.now - begun - self._case.service_s)
            self._outcome.turns += 1

    def _turn(self, work: TurnWork) -> Steps:
        apart, other, proxy = self._apart, self._other, self._proxy
        streamed = bool(self._case.stream and self._case.service_s)
        # the first and the last step of a stream's turn are as its chunks
        share = 1 / (LUMPS + 2) if streamed else BEFORE
        yield from other.work(work.client * share, apart["client_ms"] * share)
        yield from proxy.work(work.proxy * share, apart["proxy_ms"] * share)
        yield from other.work(work.engine * share, apart["engine_ms"] * share)
        if streamed:
            for number in range(LUMPS):
                after_s = self._case.service_s * (number + 0.5) / LUMPS
                self._environment.process(self._chunks(work, share, after_s))
        yield self._environment.timeout(self._case.service_s)
        yield from other.work(work.engine * share, apart["engine_ms"] * share)
        yield from proxy.work(work.proxy * share, apart["proxy_ms"] * share)
        yield from other.work(work.redis, apart["redis_ms"])
        yield from other.work(work.client * share, apart["client_ms"] * share)

    def _chunks(self, work: TurnWork, share: float, after_s: float) -> Steps:
        """Some chunks on their way, while the engine already makes the next ones."""
        apart = self._apart
        yield self._environment.timeout(after_s)
        yield from self._other.work(work.engine * share, apart["engine_ms"] * share)
        yield from self._proxy.work(work.proxy * share, apart["proxy_ms"] * share)
        yield from self._other.work(work.client * share, apart["client_ms"] * share)


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


@dataclass(frozen=True, slots=True)
class Load:
    """What each rollout does, and its engine. A rollout that ends is replaced by a new one."""

    case: Case
    speed: Speed


class DeploymentSimulation:
    """A deployment in its steady state: proxies, shards and engines on cores of their own."""

    def __init__(self, load: Load, costs: Costs, deployment: Deployment) -> None:
        self._load, self._deployment = load, deployment
        self._costs = costs.turn(load.case.store, load.case.stream)
        self._environment = simpy.Environment()
        speed = 1 - deployment.watching
        self._proxies = [Server(self._environment, speed) for _ in range(deployment.processes)]
        self._shards = [Server(self._environment) for _ in range(deployment.shards)]
        self._engines = [Engine(self._environment, load.speed) for _ in range(deployment.engines)]
        self._draw = random.Random(SEED)
        case = load.case
        self._turns = [
            (n, TurnKind(case.prompt_ids(n), case.appended_ids, case.completion_ids, n == 0))
            for n in range(case.turns)
        ]
        self._work = [TurnWork.of(self._costs, turn) for _, turn in self._turns]
        self._outcome = Outcome()
        self._measuring = False

    def run(self, warm_up_s: float, seconds: float) -> Outcome:
        """Let rollouts start in the middle of their lives, wait, then measure."""
        for number in range(self._deployment.rollouts):
            self._environment.process(self._rollouts(number))
        if self._deployment.background_per_s > 0:
            for shard in self._shards:
                self._environment.process(self._background(shard))
        self._environment.run(until=warm_up_s)
        proxy_s, redis_s = self._busy()
        self._measuring = True
        self._environment.run(until=warm_up_s + seconds)
        outcome, after = self._outcome, self._busy()
        outcome.seconds, outcome.proxy_s, outcome.redis_s = seconds, after[0] - proxy_s, after[1] - redis_s
        return outcome

    def _busy(self) -> tuple[float, float]:
        return sum(s.busy_s for s in self._proxies), sum(s.busy_s for s in self._shards)

    def _rollouts(self, number: int) -> Steps:
        """One place for a rollout, with one rollout after the other; each on the engine of its place."""
        draw = random.Random(f"{SEED} rollout {number}")
        case, engine = self._load.case, self._engines[number % len(self._engines)]
        turn = draw.randrange(case.turns)
        yield self._environment.timeout(draw.uniform(0.0, 2 * case.think_s))
        while True:
            # with sessions, all turns of a rollout are on one shard, and may be on any process
            shard = self._shards[draw.randrange(len(self._shards))]
            for number_of_turn in range(turn, case.turns):
                yield self._environment.timeout(draw.expovariate(1 / case.think_s) if case.think_s else 0.0)
                proxy = self._proxies[draw.randrange(len(self._proxies))]
                yield from self._turn(number_of_turn, proxy, shard, engine)
            turn = 0

    def _turn(self, number: int, proxy: Server, shard: Server, engine: Engine) -> Steps:
        now = self._environment
        case, work, apart = self._load.case, self._work[number], self._costs.apart
        lumps = LUMPS if case.stream else 0
        share = 1 / (lumps + 2) if lumps else BEFORE
        rest = share if lumps else 1 - BEFORE
        begun = now.now
        yield from proxy.work(work.proxy * share, apart["proxy_ms"] * share)
        sent = now.now
        new_ids = case.opening_ids if number == 0 else case.appended_ids
        if lumps:
            now.process(self._chunks(proxy, work.proxy * share, apart["proxy_ms"] * share, engine.latest_s))
        yield engine.serve(new_ids, case.completion_ids)
        served_s = engine.latest_s = now.now - sent
        yield from proxy.work(work.proxy * rest, apart["proxy_ms"] * rest)
        yield from shard.work(work.redis, apart["redis_ms"])
        if self._measuring:
            self._outcome.turns += 1
            self._outcome.added_s.append(now.now - begun - served_s)

    def _chunks(self, proxy: Server, ms: float, apart_ms: float, seconds: float) -> Steps:
        """The chunks of a stream pass the process, for as long as the engine's latest answer took."""
        for _ in range(LUMPS):
            yield self._environment.timeout(seconds / LUMPS)
            yield from proxy.work(ms, apart_ms)

    def _background(self, shard: Server) -> Steps:
        work = sum(each.redis for each in self._work) / len(self._work)
        while True:
            yield self._environment.timeout(self._draw.expovariate(self._deployment.background_per_s))
            self._environment.process(shard.work(work, self._costs.apart["redis_ms"]))
