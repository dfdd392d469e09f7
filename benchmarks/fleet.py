"""How a replica of a fleet is chosen: tokenproxy and vllm-router's policies under the same load."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from urllib.parse import quote

import uvloop

from benchmarks.client import Rollout, Step, Tally, hold, http_request
from benchmarks.measure import Effort
from benchmarks.peers import router_for_fleet, run_peer
from benchmarks.processes import Cores, StartError, engines, get_json, pinned, proxy, scratch_folder
from benchmarks.report import Part, percentile, progress
from benchmarks.texts import Words

OURS = "tokenproxy sticky_least_loaded"
_POLICIES = ("consistent_hash", "cache_aware", "sticky_least_loaded")
_LIMIT_S = 120.0
_GROUP, _FAMILIES = 8, 4
"""Rollouts of one prompt, and different system messages."""
_PAUSE_S = 0.14
"""Mean time that a tool takes."""
TEMPLATE_IDS = 8
"""Ids that the chat template adds to a prompt for each of its turns, about."""
TOOLS = (
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}},
)


def rows() -> list[str]:
    """Programs and their policies."""
    kinds = ("plain", "sessions")
    return [OURS, *(f"vllm-router {policy}, {kind}" for policy in _POLICIES for kind in kinds)]


def make_load(words: Words, count: int = 400, *, all_sessions: bool = False) -> Iterator[Rollout]:
    """Conversations in the order in which they start: the same in every run; a group starts together.

    Lengths are long-tailed: most conversations are short, some are very long.
    """
    draw = random.Random(2026)
    system_ids = [draw.randrange(3, 10) * 128 for _ in range(_FAMILIES)]
    number = 0
    while number < count:
        family, question_ids = draw.randrange(_FAMILIES), _long_tailed(draw, 400, 4000)
        system = words.text(random.Random(f"family {family}"), system_ids[family])
        grouped = number % (2 * _GROUP) < _GROUP
        question = words.text(random.Random(f"opening {number}"), question_ids - TEMPLATE_IDS)
        for _ in range(min(_GROUP if grouped else 1, count - number)):
            opening = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            steps = _steps(draw, words, random.Random(f"conversation {number}"))
            named = draw.random() < 0.25 or all_sessions
            yield Rollout(opening, steps, session=f"session-{number}" if named else None, tools=TOOLS)
            number += 1


def _steps(draw: random.Random, words: Words, texts: random.Random) -> list[Step]:
    turns = min(30, max(2, round(draw.lognormvariate(1.9, 0.6))))
    steps = [Step(0.0, "", _long_tailed(draw, 150, 1500))]
    for _ in range(turns - 1):
        appended, completion = _long_tailed(draw, 350, 6000), _long_tailed(draw, 150, 1500)
        text = words.text(texts, appended - TEMPLATE_IDS)
        steps.append(Step(draw.expovariate(1 / _PAUSE_S), text, completion))
    return steps


def _long_tailed(draw: random.Random, middle: int, most: int) -> int:
    """A number of ids, log-normal around `middle`."""
    return max(16, min(most, round(middle * draw.lognormvariate(0.0, 0.9))))


@dataclass(slots=True)
class Result:
    """All rounds of one policy."""

    tallies: list[Tally] = field(default_factory=list)
    totals: list[list[dict[str, float]]] = field(default_factory=list)
    """Of each replica, in each round."""
    core: list[float] = field(default_factory=list)


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Hold all conversations with each policy, each time on a new fleet; the policies alternate.

    Raises:
        StartError: a process does not start.
        BadResponse: a client got an error.
    """
    words, rounds = Words(), effort.rounds or 1
    results, absent = {row: Result() for row in chosen}, ""
    with scratch_folder() as folder:
        words.write(folder)
        for number in range(rounds):
            for row, result in results.items():
                progress(f"fleet: round {number + 1} of {rounds}: {row}")
                try:
                    _one_round(row, result, words, effort, folder)
                except StartError as error:
                    if row == OURS:
                        raise
                    absent = f"vllm-router was not measured: {error}"
    head = ["policy", "makespan", "hit rate", "p50", "p99", "requests", "busy", "core", "exact"]
    table = [head, *(_row(row, result) for row, result in results.items() if result.tallies)]
    return [*([table] if len(table) > 1 else []), *([absent] if absent else [])]


def _one_round(row: str, result: Result, words: Words, effort: Effort, folder: Path) -> None:
    cores = Cores.pick()
    policy, _, kind = row.partition(" ")[2].partition(", ")
    sessions = kind == "sessions"
    with engines(cores.engine, folder) as ports:
        if row == OURS:
            started = proxy(cores.proxy, ports, folder / f"proxy-{len(result.core)}.log")
        else:
            started = run_peer(router_for_fleet(policy, ports), cores.proxy, ports[0], folder)

        def finish(rollout: Rollout) -> bytes:
            return http_request(
                f"/finish_session?session_id={quote(rollout.session or '')}", b"", rollout.headers
            )

        with started as running, pinned(cores.client):
            before, cpu_s, tally = [get_json(port, "/totals") for port in ports], running.cpu_s(), Tally()
            load = make_load(words, int(effort.pick(400, 24)), all_sessions=sessions)
            connections = int(effort.pick(128, 12))
            ends = finish if sessions and policy == "sticky_least_loaded" else None
            uvloop.run(hold(running.port, load, connections, tally, limit_s=_LIMIT_S, finish=ends))
            result.core.append((running.cpu_s() - cpu_s) / tally.seconds)
            after = [get_json(port, "/totals") for port in ports]
    result.tallies.append(tally)
    result.totals.append([{k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True)])


def _row(row: str, result: Result) -> list[str]:
    tallies, totals = result.tallies, result.totals
    hits = [sum(t["cached_ids"] for t in each) / sum(t["prompt_ids"] for t in each) for each in totals]
    requests = [[t["requests"] for t in each] for each in totals]
    busy = [[t["busy_s"] / tally.seconds for t in each] for tally, each in zip(tallies, totals, strict=True)]
    later = sum(len(tally.latencies_s) - tally.begun for tally in tallies)
    exact = f"{sum(tally.extended for tally in tallies) / max(1, later):.1%}"
    return [
        row,
        f"{'> ' if any(tally.cut for tally in tallies) else ''}{median(t.seconds for t in tallies):.1f} s",
        f"{median(hits):.1%}",
        *(f"{median(percentile(t.latencies_s, share) for t in tallies):.2f} s" for share in (0.5, 0.99)),
        f"{mean(map(min, requests)):.0f}-{mean(map(max, requests)):.0f}",
        f"{mean(map(min, busy)):.0%}-{mean(map(max, busy)):.0%}",
        f"{mean(result.core):.0%}",
        exact if row == OURS else "-",
    ]
