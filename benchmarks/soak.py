"""Long load: 64 connections are busy for ten minutes, while the proxy's memory and answers are watched."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import mean

import uvloop

from benchmarks.client import Connection, Rollout, Step, Tally, hold
from benchmarks.fleet import TEMPLATE_IDS, TOOLS
from benchmarks.measure import Effort
from benchmarks.processes import Cores, Running, engines, pinned, proxy, scratch_folder
from benchmarks.report import Part, percentile, progress, verdict
from benchmarks.texts import Words

GROWTH = 1.1
_CONNECTIONS, _SECONDS = 64, 600.0
_CONVERSATION_IDS, _TURNS, _APPENDED_IDS, _SAMPLED_IDS, _PAUSE_S = 32_000, 10, 300, 100, 0.5
_PROBE = b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n"


@dataclass(slots=True)
class Third:
    """What was measured in one third of the run."""

    rss_mib: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    turns: int = 0
    """Of the whole run when this third ended."""


def rows() -> list[str]:
    """There is one measurement."""
    return ["memory and errors"]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Run engines, proxy and clients.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy did not answer a probe.
    """
    cores, words, tally = Cores.pick(), Words(), Tally()
    thirds = (Third(), Third(), Third())
    seconds = effort.seconds or effort.pick(_SECONDS, 6.0)
    progress(f"soak: {seconds:g} seconds")
    with scratch_folder() as folder:
        words.write(folder)
        with (
            engines(cores.engine, folder, None, "--replicas", "2", "--slow", "0", "--faster", "50") as ports,
            proxy(cores.proxy, ports, folder / "proxy.log") as running,
            pinned(cores.client),
        ):
            cpu_s = running.cpu_s()
            uvloop.run(_drive(running, words, tally, thirds, seconds))
            core = (running.cpu_s() - cpu_s) / seconds
            store_mib = sum(file.stat().st_size for file in folder.glob("proxy.log.db*")) / 2**20
    turns = len(tally.latencies_s)
    thirds[2].turns = turns
    about = (
        f"{turns:,} turns of {tally.begun:,} conversations in {seconds / 60:g} minutes; {core:.0%} of a core"
    )
    table = [["third", "memory, mean", "max", "turns", "p50", "p99", "probe p50", "p99", "max"]]
    begin = 0
    for name, third in zip(("first", "second", "last"), thirds, strict=True):
        latencies, begin = tally.latencies_s[begin : third.turns], third.turns
        cells = [f"{mean(third.rss_mib or [0]):.0f} MiB", f"{max(third.rss_mib, default=0):.0f} MiB"]
        table.append(
            [
                name,
                *cells,
                f"{len(latencies):,}",
                *_ms(latencies, 0.5, 0.99),
                *_ms(third.probe_s, 0.5, 0.99, 1.0),
            ]
        )
    growth = max(thirds[2].rss_mib, default=0.0) / max(thirds[0].rss_mib, default=1.0)
    later, errors = turns - tally.begun, len(tally.errors)
    exact = tally.extended / max(1, later)
    aims = [
        ["aim", "measured", "", ""],
        ["memory, last third / first", f"{growth:.2f}x", f"<= {GROWTH:g}x", verdict(growth <= GROWTH)],
        ["errors", str(errors), "0", verdict(not errors)],
        ["later turns that are exact", f"{exact:.1%}", "100%", verdict(tally.extended == later)],
    ]
    failed = [f"first error: {tally.errors[0]}"] if errors else []
    return [f"{about}; store {store_mib:,.0f} MiB", table, aims, *failed]


async def _drive(
    running: Running, words: Words, tally: Tally, thirds: tuple[Third, ...], seconds: float
) -> None:
    watch = asyncio.create_task(_watch(running, tally, thirds, seconds))
    await hold(running.port, _conversations(words), _CONNECTIONS, tally, limit_s=seconds, patient=True)
    watch.cancel()
    await asyncio.wait([watch])
    if not watch.cancelled():
        watch.result()  # raises what ended it


async def _watch(running: Running, tally: Tally, thirds: tuple[Third, ...], seconds: float) -> None:
    """Sample the memory, and probe the proxy."""
    connection, started = await Connection.connect(running.port), time.perf_counter()
    while True:
        await asyncio.sleep(min(0.5, seconds / 60))
        third = thirds[min(2, int(3 * (time.perf_counter() - started) / seconds))]
        third.rss_mib.append(running.rss_mib())
        third.probe_s.append((await connection.exchange(_PROBE)).seconds)
        third.turns = len(tally.latencies_s)


def _conversations(words: Words) -> Iterator[Rollout]:
    """Conversations without end, all of different texts."""
    question_ids = _CONVERSATION_IDS - _TURNS * (_APPENDED_IDS + _SAMPLED_IDS) - 100
    for number in count():
        draw = random.Random(f"conversation {number}")
        ids = (("system", 100), ("user", question_ids))
        opening = [{"role": role, "content": words.text(draw, size)} for role, size in ids]
        texts = ("", *(words.text(draw, _APPENDED_IDS - TEMPLATE_IDS) for _ in range(_TURNS)))
        steps = [Step(_PAUSE_S if text else 0.0, text, _SAMPLED_IDS) for text in texts]
        yield Rollout(opening, steps, session=None if number % 4 else f"session-{number}", tools=TOOLS)


def _ms(samples: Sequence[float], *shares: float) -> list[str]:
    return [f"{1000 * percentile(samples, share):.0f} ms" if samples else "-" for share in shares]
