"""How a replica of a fleet is chosen: tokenproxy and vllm-router's policies under the same load."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
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


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Hold all conversations with each policy, each time on a new fleet.

    Raises:
        StartError: a process does not start.
        BadResponse: a client got an error.
    """
    words, absent = Words(), list[Part]()
    table = [["policy", "makespan", "hit rate", "p50", "p99", "requests", "busy", "core", "exact"]]
    with scratch_folder() as folder:
        words.write(folder)
        for row in chosen:
            progress(f"fleet: {row}")
            try:
                table.append(_measure_row(row, words, effort, folder))
            except StartError as error:
                if row == OURS:
                    raise
                absent = [f"vllm-router was not measured: {error}"]
    return [*([table] if len(table) > 1 else []), *absent]


def _measure_row(row: str, words: Words, effort: Effort, folder: Path) -> list[str]:
    cores, tally = Cores.pick(), Tally()
    policy, _, kind = row.partition(" ")[2].partition(", ")
    sessions = kind == "sessions"
    with engines(cores.engine, folder) as ports:
        if row == OURS:
            started = proxy(cores.proxy, ports, folder / "proxy.log")
        else:
            started = run_peer(router_for_fleet(policy, ports), cores.proxy, ports[0], folder)

        def finish(rollout: Rollout) -> bytes:
            path = f"/finish_session?session_id={quote(rollout.session or '')}"
            return http_request(path, b"", rollout.headers)

        with started as running, pinned(cores.client):
            before, cpu_s = [get_json(port, "/totals") for port in ports], running.cpu_s()
            load = make_load(words, int(effort.pick(400, 24)), all_sessions=sessions)
            connections = int(effort.pick(128, 12))
            ends = finish if sessions and policy == "sticky_least_loaded" else None
            uvloop.run(hold(running.port, load, connections, tally, limit_s=_LIMIT_S, finish=ends))
            core = (running.cpu_s() - cpu_s) / tally.seconds
            after = [get_json(port, "/totals") for port in ports]
    totals = [{k: a[k] - b[k] for k in a} for a, b in zip(after, before, strict=True)]
    hits = sum(each["cached_ids"] for each in totals) / sum(each["prompt_ids"] for each in totals)
    requests, busy = ([each[name] for each in totals] for name in ("requests", "busy_s"))
    exact = tally.extended / max(1, len(tally.latencies_s) - tally.begun)
    return [
        row,
        f"{'> ' if tally.cut else ''}{tally.seconds:.1f} s",
        f"{hits:.1%}",
        *(f"{percentile(tally.latencies_s, share):.2f} s" for share in (0.5, 0.99)),
        f"{min(requests):.0f}-{max(requests):.0f}",
        f"{min(busy) / tally.seconds:.0%}-{max(busy) / tally.seconds:.0%}",
        f"{core:.0%}",
        f"{exact:.1%}" if row == OURS else "-",
    ]
