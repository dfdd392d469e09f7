"""Measures gateways with the loads of `gateway.py`: the rate under load, and the time added to a request."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import http_request
from benchmarks.gateway_answers import Answer
from benchmarks.gateway_loads import CLIENT_HEADERS, FIRST_NUMBER, Load, Loads
from benchmarks.gateway_wrk import NoResponse, Pace, run_wrk
from benchmarks.load import BadResponse, Latency
from benchmarks.processes import Proxy, get_json, get_metrics
from benchmarks.report import percentile

_CHECKED = 7_000_000
"""Number of the conversation that `check` sends first: none that is measured."""
_SETTLED, _PATIENCE_S = 0.03, 60.0
"""Share of a core below which a process is idle, and how long to wait for that."""
_PROMPTS = re.compile(r'^tokenproxy_prompts_total\{.*source="(\w+)".*\} (\S+)$', re.MULTILINE)
_TURNS = re.compile(r"^tokenproxy_turns_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """What requests are sent to: the engine itself, or a gateway in front of it."""

    name: str
    port: int
    running: Proxy | None = None
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
    p50_ms: float
    p99_ms: float
    cpu_ms: float = 0.0
    """CPU time of the gateway's process per request."""
    written_kb: float = 0.0
    """Kilobytes that its process wrote to files, per recorded turn; 0 if it records none."""
    others: float = 0.0
    """Share of its core that other programs used."""
    extended: float = 0.0
    """Share of the prompts that continue recorded ids."""


@dataclass(slots=True)
class Cell:
    """All rounds of one load through one target."""

    samples: list[Sample] = field(default_factory=list)
    problem: str = ""
    """Why it was not measured, or not to the end."""
    note: str = ""
    """What the responses lacked."""
    pace: Pace | None = None

    def median(self, name: str) -> float:
        """The median round, of one field of `Sample`."""
        values: list[float] = [getattr(sample, name) for sample in self.samples]
        return median(values)


@dataclass(slots=True)
class Added:
    """Times of sequential requests, alternately to the engine and through a gateway."""

    direct_ms: list[float] = field(default_factory=list)
    proxy_ms: list[float] = field(default_factory=list)

    def ms(self, share: float = 0.5) -> float:
        """Milliseconds that the gateway adds: its percentile minus the direct median."""
        return percentile(self.proxy_ms, share) - median(self.direct_ms)


@dataclass(frozen=True, slots=True)
class Bench:
    """The engine, and what is needed to send it loads."""

    engine: Target
    loads: Loads
    folder: Path
    seconds: int

    def use(self, load: Load) -> None:
        """Select the engine's answer to a load."""
        if get_json(self.engine.port, "/use/" + load.answer) is None:
            raise BadResponse(f"the engine knows no answer {load.answer!r}")

    def check(self, target: Target, load: Load) -> tuple[str, Pace]:
        """Send two requests; returns what the response lacks of the answer, and the pace to load it at.

        Raises:
            BadResponse: it is an error, or holds another text.
        """
        self.use(load)
        answer = self.loads.answers[load.answer]
        _check(target, load, answer, _CHECKED)  # the first one opens connections
        lacking, seconds = _check(target, load, answer, _CHECKED + 1)
        settle(target.running)
        return lacking, Pace.of(self.seconds, seconds)

    def measure(self, target: Target, load: Load, pace: Pace | None = None) -> Sample:
        """One round under load.

        Args:
            pace: None for one of a fast gateway.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(load)
        pace = pace or Pace(self.seconds)
        try:
            return self._round(target, load, pace)
        except NoResponse:
            return self._round(target, load, pace.longer())

    def _round(self, target: Target, load: Load, pace: Pace) -> Sample:
        first = target.positions[load.answer]
        url = f"http://127.0.0.1:{target.port}"
        before = _Counters.read(target)
        try:
            result = run_wrk(url, load, self.folder, pace, first, target.prefix)
        finally:
            during = _Counters.read(target)
            settle(target.running)
        after = _Counters.read(target)
        target.positions[load.answer] = result.resume(first) if load.conversations else result.position
        recorded = after.turns - before.turns if target.ours else result.position - first
        prompts = after.prompts - before.prompts
        return Sample(
            result.per_second,
            result.p50_ms,
            result.p99_ms,
            1000 * (during.cpu_s - before.cpu_s) / result.requests,
            (after.written - before.written) / 1000 / recorded if recorded else 0.0,
            (during.others_s - before.others_s) / result.seconds,
            (after.extended - before.extended) / prompts if prompts else 0.0,
        )

    def add(self, added: Added, target: Target, loads: tuple[Load, Load], samples: int) -> None:
        """Time requests one after the other, each to the engine itself and through the target.

        Args:
            loads: what the engine is sent, and what the target is sent.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(loads[0])
        first = target.positions[loads[1].answer]
        target.positions[loads[1].answer] += samples
        with closing(Latency(self.engine.port)) as direct, closing(Latency(target.port)) as proxied:
            for position in range(first, first + samples):
                requests = [_request(load, position) for load in loads]
                added.direct_ms.append(direct.measure(requests[0]))
                added.proxy_ms.append(proxied.measure(requests[1]))

    def begin(self, target: Target, load: Load) -> None:
        """Send the first request of each of the conversations that take turns.

        Raises:
            BadResponse: a response is an error.
        """
        self.use(load)
        with closing(Latency(target.port)) as line:
            for number in range(load.conversations):
                line.measure(_request(load, number))
        target.positions[load.answer] = load.conversations


def settle(running: Proxy | None) -> None:
    """Wait until a gateway is idle: some record after they have responded."""
    deadline = time.monotonic() + _PATIENCE_S
    while running is not None and time.monotonic() < deadline:
        before, started = running.cpu_s(), time.monotonic()
        time.sleep(0.2)
        if running.cpu_s() - before <= _SETTLED * (time.monotonic() - started):
            return


def _request(load: Load, position: int) -> bytes:
    steps, number = divmod(position, load.conversations) if load.conversations else (0, position)
    sessions = {"x-session-id": f"bench-{FIRST_NUMBER + number}"} if load.sessions else {}
    return http_request(load.path, {**CLIENT_HEADERS, **sessions}, load.body(number, steps))


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a gateway's process."""

    cpu_s: float = 0.0
    others_s: float = 0.0
    written: int = 0
    turns: float = 0.0
    """Recorded ones."""
    prompts: float = 0.0
    extended: float = 0.0

    @classmethod
    def read(cls, target: Target) -> "_Counters":
        """Their values now."""
        running = target.running
        if running is None:
            return cls()
        prompts: dict[str, float] = defaultdict(float)
        page = get_metrics(target.port) if target.ours else ""
        for source, count in _PROMPTS.findall(page):
            prompts[source] += float(count)
        return cls(
            running.cpu_s(),
            running.other_programs_s(),
            running.written_bytes(),
            sum(float(count) for count in _TURNS.findall(page)),
            sum(prompts.values()),
            prompts["extended"],
        )


def _check(target: Target, load: Load, answer: Answer, number: int) -> tuple[str, float]:
    """See `Bench.check`; and how many seconds the response took."""
    body = load.body(number)
    connection = HTTPConnection("127.0.0.1", target.port, timeout=60)
    try:
        started = time.monotonic()
        connection.request("POST", target.prefix + load.path, body, CLIENT_HEADERS)
        response = connection.getresponse()
        data = response.read()
        seconds = time.monotonic() - started
    finally:
        connection.close()
    if response.status != 200:
        raise BadResponse(f"status {response.status}: {data[:300].decode('utf-8', 'replace')}")
    choices = list(_choices(data, streamed=b'"stream":true' in load.closing))
    text = "".join(
        (choice.get("message") or choice.get("delta") or {}).get("content") or "" for choice in choices
    )
    if text != answer.text:
        raise BadResponse(f"another text than the engine's: {text[:200]!r}")
    requested = b'"return_token_ids":true' in load.closing
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "without ids" if requested and ids != answer.ids else "", seconds


def _choices(data: bytes, *, streamed: bool) -> Iterator[dict[str, Any]]:
    """The choices of a completion or of all chunks of a stream."""
    events = [data]
    if streamed:
        lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
        events = [line for line in lines if line.strip() != b"[DONE]"]
    for event in events:
        try:
            yield from json.loads(event)["choices"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadResponse(f"no chat completion: {event[:200]!r}") from error
