"""Simulate the fleet benchmark in virtual time: the same load and engines, any way to choose a replica."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.fleet_choosers import Chooser, Request, Response
from benchmarks.fleet_load import Conversation, make_load
from benchmarks.fleet_model import EngineModel, Job, Speed, Totals
from benchmarks.fleet_policy import POLICIES
from benchmarks.fleet_speeds import CONNECTIONS, FAST, SLOW, fleet_speeds
from benchmarks.report import percentile, table


@dataclass(slots=True)
class Outcome:
    """What a policy made of the load."""

    makespan_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Of each turn."""
    totals: list[Totals] = field(default_factory=list)
    """Of each replica."""

    @property
    def hit_rate(self) -> float:
        """Cached ids / ids of all prompts."""
        return sum(t.cached_ids for t in self.totals) / max(1, sum(t.prompt_ids for t in self.totals))

    @property
    def busy(self) -> tuple[float, float]:
        """The least and the greatest share of the time that a replica was busy."""
        shares = [totals.busy_s / self.makespan_s for totals in self.totals]
        return min(shares), max(shares)


@dataclass(order=True, slots=True)
class _Event:
    at: float
    order: int
    conversation: int = field(compare=False, default=-1)
    """Whose next turn is due; -1 if an engine changes."""
    engine: int = field(compare=False, default=-1)
    version: int = field(compare=False, default=-1)


class Simulation:
    """One run of a load on a fleet."""

    def __init__(
        self, load: Sequence[Conversation], speeds: Sequence[Speed], chooser: Chooser, connections: int
    ) -> None:
        self._load, self._chooser, self._connections = load, chooser, connections
        self._engines = [EngineModel(speed) for speed in speeds]
        self._versions = [0] * len(speeds)
        """An engine's event is stale if the engine changed after it was written."""
        self._events: list[_Event] = []
        self._order = 0
        self._turns = [0] * len(load)
        self._sent: dict[Job, tuple[Conversation, Request, int, float]] = {}
        self._next = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run until the last response."""
        for _ in range(min(self._connections, len(self._load))):
            self._begin(0.0)
        while self._events:
            event = heappop(self._events)
            if event.conversation >= 0:
                self._send(self._load[event.conversation], event.at)
            elif event.version == self._versions[event.engine]:
                self._advance(event.engine, event.at)
        self._outcome.totals = [engine.totals for engine in self._engines]
        return self._outcome

    def _begin(self, now: float) -> None:
        if self._next < len(self._load):
            self._push(_Event(now, 0, conversation=self._next))
            self._next += 1

    def _send(self, conversation: Conversation, now: float) -> None:
        turn = self._turns[conversation.number]
        blocks, prompt = conversation.blocks(turn), conversation.prompt_ids(turn)
        job = Job(blocks, prompt, conversation.turns[turn].completion_ids)
        request = Request(
            conversation.number,
            turn,
            conversation.session,
            prompt,
            conversation.turns[turn].appended_ids,
            blocks[: job.prompt_blocks],
        )
        replica = self._chooser.choose(request, now)
        self._sent[job] = (conversation, request, replica, now)
        self._advance(replica, now)
        self._engines[replica].submit(now, job)
        self._schedule(replica)

    def _advance(self, replica: int, now: float) -> None:
        for job in self._engines[replica].advance(now):
            conversation, request, _, sent = self._sent.pop(job)
            self._outcome.latencies_s.append(now - sent)
            self._outcome.makespan_s = now
            response = Response(request, replica, now - sent, job.completion_ids, job.cached_ids)
            self._chooser.finished(response, now)
            self._turns[conversation.number] += 1
            turn = self._turns[conversation.number]
            if turn < len(conversation.turns):
                self._push(_Event(now + conversation.turns[turn].pause_s, 0, conversation.number))
            else:
                self._chooser.ended(conversation.number)
                self._begin(now)
        self._schedule(replica)

    def _schedule(self, replica: int) -> None:
        self._versions[replica] += 1
        if (change := self._engines[replica].next_change()) is not None:
            self._push(_Event(change, 0, engine=replica, version=self._versions[replica]))

    def _push(self, event: _Event) -> None:
        self._order += 1
        event.order = self._order
        heappush(self._events, event)


def row(name: str, outcome: Outcome, ideal_s: float) -> list[str]:
    """A row of the table of `main`."""
    requests = [totals.requests for totals in outcome.totals]
    return [
        name,
        f"{outcome.makespan_s:.1f} s",
        f"{outcome.makespan_s / ideal_s:.2f}",
        f"{outcome.hit_rate:.1%}",
        f"{percentile(outcome.latencies_s, 0.5):.2f} s",
        f"{percentile(outcome.latencies_s, 0.99):.2f} s",
        f"{min(requests)}-{max(requests)}",
        f"{outcome.busy[0]:.0%}-{outcome.busy[1]:.0%}",
    ]


TITLES = ["policy", "makespan", "of best", "hit rate", "p50", "p99", "requests", "busy"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--slow", type=int, default=SLOW, help="replicas of eight that are slow")
    parser.add_argument("--seeds", type=int, default=1, help="average over this number of loads")
    parser.add_argument(
        "--cache", type=int, default=FAST.capacity_ids, help="ids that a replica's cache holds"
    )
    parser.add_argument(
        "--half", type=float, default=FAST.half, help="sequences that halve the decoding speed"
    )
    parser.add_argument("--only", default="", help="policies whose name contains this")
    options = parser.parse_args(argv)
    names = [name for name in POLICIES if options.only in name]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for seed in range(options.seeds):
        load = make_load(options.conversations, seed=2026 + seed)
        for name in names:
            fast = replace(FAST, capacity_ids=options.cache, half=options.half)
            speeds = fleet_speeds(fast, slow=options.slow)
            simulation = Simulation(load, speeds, POLICIES[name](len(speeds)), options.connections)
            outcomes[name].append(simulation.run())
    merged = {name: _merge(runs) for name, runs in outcomes.items()}
    best = min(outcome.makespan_s for outcome in merged.values())
    print(table([TITLES, *(row(name, outcome, best) for name, outcome in merged.items())]))
    return 0


def _merge(runs: Sequence[Outcome]) -> Outcome:
    """The mean makespan, with all latencies, and the totals of each replica."""
    merged = Outcome(sum(run.makespan_s for run in runs) / len(runs))
    for run in runs:
        merged.latencies_s += run.latencies_s
    for replica in zip(*(run.totals for run in runs), strict=True):
        fields = ("requests", "prompt_ids", "cached_ids", "completion_ids", "busy_s")
        mean = {name: sum(getattr(t, name) for t in replica) // len(runs) for name in fields}
        merged.totals.append(Totals(**mean, longest_queue=max(t.longest_queue for t in replica)))
    return merged


if __name__ == "__main__":
    sys.exit(main())
