"""Measures requests: the time that a gateway adds to each, and its CPU time and rate under load."""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.client import BadResponse, Line, Response, load
from benchmarks.loads import Load, Loads
from benchmarks.processes import Running, core_busy_s, get, get_json
from benchmarks.report import percentile
from benchmarks.texts import Answer

CONNECTIONS = 32
_CHECKED = 7_000_000
"""Number of the conversation that `check` sends first: none that is measured."""
_TURNS = re.compile(r"^tokenproxy_turns_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    quick: bool = False
    """Only check that it runs."""
    rounds: int | None = None
    seconds: float | None = None
    """Of each load and round."""

    def pick(self, full: float, quick: float) -> float:
        """One of two numbers."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Target:
    """What requests are sent to: the engine itself, or a gateway in front of it."""

    port: int
    running: Running | None = None
    """None for the engine."""
    ours: bool = False
    prefix: str = ""
    """Of the paths of requests."""
    positions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Position of the next request of each load, by the name of its answer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of a load."""

    per_second: float
    p99_ms: float
    core: float
    """Share of its core that the gateway's process used."""
    cpu_ms: float
    """CPU time of the gateway's process per request."""
    written_kb: float
    """Kilobytes that its process wrote to files, per recorded turn; 0 if it records none."""
    others: float
    """Share of its core that other programs used."""
    busiest: float
    """Share of the busiest process below it in the CPU time of all of them."""


@dataclass(slots=True)
class Cell:
    """All rounds of one load through one target."""

    direct_ms: list[float] = field(default_factory=list)
    """Times of sequential requests to the engine, each followed by one through the gateway."""
    proxy_ms: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    connections: int = CONNECTIONS
    problem: str = ""
    """Why it was not measured, or not to the end."""
    note: str = ""
    """What the responses lacked."""

    def added(self, share: float = 0.5) -> float:
        """Milliseconds that the gateway adds: its percentile minus the direct median."""
        return percentile(self.proxy_ms, share) - median(self.direct_ms)

    def median(self, name: str) -> float:
        """The median round, of one field of `Sample`."""
        values: list[float] = [getattr(sample, name) for sample in self.samples]
        return median(values)

    @contextmanager
    def problems(self) -> Iterator[None]:
        """Keep a problem instead of ending the benchmark."""
        try:
            yield
        except (BadResponse, OSError) as error:
            self.problem = str(error) or type(error).__name__


class Bench:
    """The engine, and what is needed to send loads to it and to gateways in front of it."""

    def __init__(self, port: int, loads: Loads) -> None:
        self.engine, self.loads = Target(port), loads

    def use(self, load: Load) -> None:
        """Select the engine's answer to a load."""
        for path in (f"/use/{load.answer}", f"/service/{load.service_s!r}"):
            if get_json(self.engine.port, path) is None:
                raise BadResponse(f"the engine does not know {path}")

    def check(self, target: Target, load: Load) -> tuple[str, float]:
        """Send two requests.

        Returns: what the response lacks of the engine's answer, and the seconds until it was complete.

        Raises:
            BadResponse: a response is an error, or holds another text than the engine's.
        """
        self.use(load)
        with closing(Line(target.port)) as line:
            for number in (_CHECKED, _CHECKED + 1):
                response = line.send(replace(load, conversations=0).request(number, target.prefix))
                lacking = _lacking(response, load, self.loads.answers[load.answer])
        return lacking, response.seconds

    def sequential(self, cell: Cell, target: Target, loads: tuple[Load, Load], samples: int) -> None:
        """Time requests one after the other, each to the engine itself and through the target.

        Args:
            loads: what the engine is sent, and what the target is sent.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(loads[0])
        with closing(Line(self.engine.port)) as direct, closing(Line(target.port)) as proxied:
            for _ in range(samples):
                cell.direct_ms.append(1000 * direct.send(loads[0].request(0)).seconds)
                cell.proxy_ms.append(1000 * proxied.send(loads[1].request(0)).seconds)

    def under_load(self, cell: Cell, target: Target, load_: Load, seconds: float) -> None:
        """One round under load.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(load_)
        first = target.positions[load_.answer]
        before = _Counters(target)
        try:
            latencies_s, elapsed_s = load(
                target.port, load_.requests(first, target.prefix), cell.connections, seconds
            )
        finally:
            during = _Counters(target)
            if target.running is not None:
                target.running.rest()
        after, sent = _Counters(target), len(latencies_s)
        target.positions[load_.answer] += sent
        recorded = after.turns - before.turns if target.ours else sent
        cpu_s, core_s = during.cpu_s - before.cpu_s, during.core_s - before.core_s
        used = [worker_s - before.workers.get(pid, 0.0) for pid, worker_s in during.workers.items()]
        cell.samples.append(
            Sample(
                sent / elapsed_s,
                1000 * percentile(latencies_s, 0.99),
                cpu_s / elapsed_s,
                1000 * cpu_s / sent,
                (after.written - before.written) / 1000 / recorded if recorded else 0.0,
                max(0.0, core_s - cpu_s) / elapsed_s,
                max(used, default=1.0) / (sum(used) or 1.0),
            )
        )

    def begin(self, target: Target, load_: Load) -> None:
        """Send the first request of each of the conversations that take turns.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(load_)
        with closing(Line(target.port)) as line:
            for number in range(load_.conversations):
                line.send(load_.request(number, target.prefix))
        target.positions[load_.answer] = load_.conversations


def _lacking(response: Response, load_: Load, answer: Answer) -> str:
    """What the response to a chat request lacks of the engine's answer.

    Raises:
        BadResponse: it holds another text.
    """
    choices = list(response.choices())
    said = ((choice.get("message") or choice.get("delta") or {}).get("content") for choice in choices)
    text = "".join(part or "" for part in said)
    if text != answer.text:
        raise BadResponse(f"another text than the engine's: {text[:200]!r}")
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "without ids" if b'"return_token_ids":true' in load_.closing and ids != answer.ids else ""


class _Counters:
    """Counters of a gateway's process; all are 0 for the engine."""

    def __init__(self, target: Target) -> None:
        running = target.running
        page = get(target.port, "/metrics")[1].decode() if target.ours else ""
        self.turns = sum(float(count) for count in _TURNS.findall(page))
        self.cpu_s = running.cpu_s() if running else 0.0
        self.written = running.written_bytes() if running else 0
        self.core_s = core_busy_s(running.core) if running and running.core >= 0 else 0.0
        """CPU seconds of all programs on its core."""
        self.workers = running.workers_cpu_s() if running else {}
