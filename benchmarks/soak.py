"""Benchmark: does the proxy stay as it is under long load? `--help` describes the measurement."""

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, scratch_folder
from benchmarks.fleet_clients import Clients, Held, exchange, hold_all
from benchmarks.fleet_load import Conversation, Turn
from benchmarks.fleet_words import Words
from benchmarks.load import BadResponse
from benchmarks.processes import Cores, Proxy, StartError, engine_fleet, get_metrics, pinned, proxy
from benchmarks.report import machine, percentile, table, verdict

CONNECTIONS = 64
CONVERSATION_IDS = 32_000
_TURNS = 10
_STEP = Turn(appended_ids=300, completion_ids=100, pause_s=0.5)
GROWTH = 1.1
"""Aim: most resident memory in the last third of the run / in the first third."""
_LOOP_LAG = re.compile(r'^tokenproxy_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)

_DESCRIPTION = f"""\
Keep {CONNECTIONS} connections busy for minutes and watch the proxy's memory and answers.

Each connection holds conversations of {CONVERSATION_IDS:,} ids: the first prompt has most of them, {_TURNS}
turns follow, each after a tool that takes half a second, then the next conversation starts. Two fake engines
answer at once (see fleet.py), so only the proxy and the tools take time. The proxy runs as `tokenproxy serve`
on a core of its own, with a new SQLite store.

  memory    resident memory of the proxy: mean and maximum of each third of the run. The aim is that the last
            third has at most {GROWTH:g} times as much as the first; a run that ends before the caches are
            full misses it
  turns     responses in each third, and how long they took
  probe     time for `GET /health`: how long others wait for the event loop, and for the core
  errors    responses that were none, or connections that broke: the aim is 0

Run it on an idle machine. Linux only: it pins processes to cores and reads /proc.
"""
_EXAMPLES = """\
examples:
  python benchmarks/soak.py                  ten minutes
  python benchmarks/soak.py --minutes 0.2    check that it runs
"""


@dataclass(slots=True)
class Third:
    """What was measured in one third of the run."""

    rss_mib: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Soaked:
    """The results of a run."""

    seconds: float
    thirds: tuple[Third, Third, Third] = field(default_factory=lambda: (Third(), Third(), Third()))
    errors: list[str] = field(default_factory=list)
    turns: int = 0
    begun: int = 0
    extended: int = 0
    core: float = 0.0
    """Load of the proxy's core."""
    store_mib: float = 0.0
    """Size of the store's files at the end."""
    loop_lag: dict[str, float] = field(default_factory=dict)
    """Of the proxy's own histogram: how often its event loop was late by at most so many seconds."""

    @property
    def growth(self) -> float:
        """Most memory in the last third / most memory in the first."""
        first, _, last = (max(third.rss_mib, default=0.0) for third in self.thirds)
        return last / first if first else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("soak.py", LINUX_ONLY)
    about = machine()
    try:
        soaked = soak(60 * options.minutes, options.connections)
    except (StartError, BadResponse) as error:
        return fail("soak.py", str(error))
    print_results(text(soaked, about), {"machine": about, **asdict(soaked)}, options.json)
    return 1 if soaked.errors else 0


def soak(seconds: float, connections: int) -> Soaked:
    """Run engines, proxy and clients.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy did not answer a probe.
    """
    cores, words, soaked = Cores.pick(), Words(), Soaked(seconds)
    with scratch_folder() as folder:
        words.write(folder)
        speed = ["--replicas", "2", "--slow", "0", "--faster", "50"]
        with (
            engine_fleet(cores.engine, folder, speed) as ports,
            proxy(cores.proxy, ports, folder / "proxy.log") as running,
            pinned(cores.client),
        ):
            cpu_s = running.cpu_s()
            uvloop.run(_drive(running, words, soaked, connections))
            soaked.core = (running.cpu_s() - cpu_s) / seconds
            soaked.loop_lag = _loop_lag(running.port)
            stored = sum(file.stat().st_size for file in folder.glob("proxy.log.db*"))
            soaked.store_mib = stored / 2**20
    return soaked


async def _drive(running: Proxy, words: Words, soaked: Soaked, connections: int) -> None:
    held = Held()
    clients = Clients(running.port, connections, limit_s=soaked.seconds, patient=True)
    started = time.perf_counter()

    def third() -> int:
        return min(2, int(3 * (time.perf_counter() - started) / soaked.seconds))

    counts: list[int] = []
    watch = asyncio.create_task(_watch(running, soaked, third, held, counts))
    await hold_all(_conversations(), words, clients, held)
    watch.cancel()
    await asyncio.wait([watch])
    if not watch.cancelled():
        watch.result()  # raises what ended it
    ends = [*counts[:2], len(held.latencies_s)]
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        soaked.thirds[number].latencies_s = held.latencies_s[begin:end]
    soaked.errors, soaked.turns = held.errors, len(held.latencies_s)
    soaked.begun, soaked.extended = held.begun, held.extended


async def _watch(
    running: Proxy, soaked: Soaked, third: Callable[[], int], held: Held, counts: list[int]
) -> None:
    """Sample the memory, and probe the proxy. `counts` gets the number of turns at the end of each third."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    pause_s = min(0.5, soaked.seconds / 60)
    while True:
        await asyncio.sleep(pause_s)
        now = third()
        while len(counts) < now:
            counts.append(len(held.latencies_s))
        soaked.thirds[now].rss_mib.append(_rss_mib(running.pid))
        begun = time.perf_counter()
        await exchange(reader, writer, b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n")
        soaked.thirds[now].probe_s.append(time.perf_counter() - begun)


def _conversations() -> Iterator[Conversation]:
    """Conversations without end, all of different texts."""
    opening = CONVERSATION_IDS - _TURNS * (_STEP.appended_ids + _STEP.completion_ids)
    first = Turn(opening, _STEP.completion_ids, 0.0)
    number = 0
    while True:
        # no two of them have the same system message: the group and family of the fleet's load do not matter
        yield Conversation(number, number, None, 100, (first, *[_STEP] * _TURNS), session=number % 4 == 0)
        number += 1


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _loop_lag(port: int) -> dict[str, float]:
    return {bound: float(count) for bound, count in _LOOP_LAG.findall(get_metrics(port))}


def text(soaked: Soaked, about: dict[str, str]) -> str:
    """The results as a Markdown table, aligned for a terminal."""
    head = [
        f"{about['cores']} cores of {about['cpu']}, Python {about['python']}",
        f"{soaked.turns:,} turns of {soaked.begun:,} conversations in {soaked.seconds / 60:g} minutes; "
        f"{soaked.core:.0%} of a core; store {soaked.store_mib:,.0f} MiB",
    ]
    rows = [["third", "memory, mean", "max", "turns", "p50", "p99", "probe p50", "p99", "max"]]
    rows += [
        _row(name, third) for name, third in zip(("first", "second", "last"), soaked.thirds, strict=True)
    ]
    later = soaked.turns - soaked.begun
    aims = [
        ["aim", "measured", "", ""],
        [
            "memory, last third / first",
            f"{soaked.growth:.2f}x",
            f"<= {GROWTH:g}x",
            verdict(soaked.growth <= GROWTH),
        ],
        ["errors", str(len(soaked.errors)), "0", verdict(not soaked.errors)],
        [
            "later turns that are exact",
            f"{soaked.extended / max(1, later):.1%}",
            "100%",
            verdict(soaked.extended == later),
        ],
    ]
    parts = ["\n".join(head), table(rows), table(aims)]
    if soaked.loop_lag:
        total = soaked.loop_lag.get("+Inf", 0.0)
        late = [[bound, f"{count / max(1, total):.2%}"] for bound, count in soaked.loop_lag.items()]
        parts.append(table([["event loop late by at most, s", "share"], *late]))
    if soaked.errors:
        parts.append("first error: " + soaked.errors[0])
    return "\n\n".join(parts)


def _row(name: str, third: Third) -> list[str]:
    cells = [name, f"{_mean(third.rss_mib):.0f} MiB", f"{max(third.rss_mib, default=0):.0f} MiB"]
    cells.append(f"{len(third.latencies_s):,}")
    for samples, shares in ((third.latencies_s, (0.5, 0.99)), (third.probe_s, (0.5, 0.99, 1.0))):
        cells += [f"{1000 * percentile(samples, share):.0f} ms" if samples else "-" for share in shares]
    return cells


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES, quick=False)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument(
        "--connections", type=int, default=CONNECTIONS, help=f"how many (default: {CONNECTIONS})"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
