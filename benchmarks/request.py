"""The cost of a request: what the proxy adds over a direct connection to an engine that does nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.loads import CHUNKS, MANY_IDS, Loads
from benchmarks.measure import Bench, Cell, Effort, Target
from benchmarks.processes import Cores, engines, pinned, proxy, scratch_folder
from benchmarks.report import Part, disturbance, progress, verdict
from benchmarks.texts import Answer, Words

_PACE_S = 0.005
"""Pause between the chunks of a paced stream: a fast engine's time per token."""
_PACED = "the same, 5 ms apart"


@dataclass(slots=True)
class Case:
    """One row."""

    name: str
    samples: int
    """Sequential requests per round; 0 if the added latency is not measured."""
    connections: int
    added_ms: float | None = None
    """Aim: the maximum of the median added latency, in milliseconds."""
    per_second: float | None = None
    """Aim: the minimum of requests per second on one core."""
    direct: Cell = field(default_factory=Cell)
    ours: Cell = field(default_factory=Cell)


def _cases() -> list[Case]:
    return [
        Case("small chat", 100, 32, 1.0, 1500),
        Case("small token route", 100, 32, 1.0, 1500),
        Case("100k ids in", 30, 8, 5.0, 200),
        Case("100k ids out", 30, 8, 5.0, 200),
        Case("100k ids in, echoed", 30, 8, 5.0, 200),
        Case("256-chunk stream", 30, 32),
        Case(_PACED, 0, 32),
    ]


def rows() -> list[str]:
    """The rows of both tables."""
    return [case.name for case in _cases()]


def make_loads(words: Words) -> Loads:
    """The requests: each is always the same."""
    loads = Loads()
    many = [(n * 7919 + 12345) % 151_643 for n in range(MANY_IDS)]  # mostly of five or six digits
    few, stop = list(range(11, 61)), words.encode("<|im_end|>")[0]
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

    def answer(ids: Sequence[int], prompt: Sequence[int]) -> Answer:
        pieces = ["Paris.", *[" bab"] * (len(ids) - 1)]
        return Answer([*ids, stop], [*pieces, ""], "".join(pieces), list(prompt))

    prompt = words.render(chat)
    loads.chat("small chat", chat, answer(few[:2], prompt))
    loads.given("small token route", few, answer(few[:19], few), numbered=False, echo=True)
    loads.given("100k ids in", many, answer(few[:2], many), numbered=False)
    loads.given("100k ids out", few, answer(many, few), numbered=False, echo=True)
    loads.given("100k ids in, echoed", many, answer(few[:19], many), numbered=False, echo=True)
    streamed = answer(few[:1] * (CHUNKS - 1), prompt)
    loads.chat("256-chunk stream", chat, streamed, stream=True)
    paced = loads.columns["256-chunk stream"]
    slow = replace(paced.ours, service_s=CHUNKS * _PACE_S)
    loads.columns[_PACED] = replace(paced, ours=slow, theirs=slow)
    return loads


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some rows.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy's responses are not the engine's.
    """
    cores, words, cases = Cores.pick(), Words(), [case for case in _cases() if case.name in chosen]
    loads = make_loads(words)
    with scratch_folder() as folder:
        words.write(folder)
        with (
            engines(cores.engine, folder, loads.answers) as (port,),
            proxy(cores.proxy, [port], folder / "proxy.log") as running,
            pinned(cores.client),
        ):
            bench, target = Bench(port, loads), Target(running.port, running, ours=True)
            rounds = effort.rounds or int(effort.pick(5, 1))
            for number in range(rounds):
                progress(f"request: round {number + 1} of {rounds}")
                for case in cases:
                    _one_round(bench, target, case, effort, first=number == 0)
    others = median(sample.others for case in cases for sample in case.ours.samples)
    latency = [["added latency", "direct p50", "proxy p50", "added p50", "aim", ""]]
    latency += [_latency_row(case) for case in cases if case.samples]
    head = ["on one core", "connections", "p99", "direct/s", "proxy/s", "ratio", "core", "CPU ms", "1000/CPU"]
    load = [[*head, "aim", ""], *map(_load_row, cases)]
    return [*([latency] if len(latency) > 1 else []), load, disturbance(others)]


def _one_round(bench: Bench, target: Target, case: Case, effort: Effort, *, first: bool) -> None:
    column = bench.loads.columns[case.name]
    loads, seconds = (column.theirs, column.ours), effort.seconds or effort.pick(2.0, 0.1)
    case.direct.connections = case.ours.connections = case.connections
    if first:
        if case.samples:  # the paced row has the same chunks
            bench.check(target, column.ours)
        bench.under_load(Cell(connections=case.connections), target, column.ours, 0.0)  # opens connections
    if case.samples:
        bench.sequential(case.ours, target, loads, max(3, round(case.samples * effort.pick(1.0, 0.1))))
    bench.under_load(case.direct, bench.engine, column.theirs, seconds)
    bench.under_load(case.ours, target, column.ours, seconds)


def _latency_row(case: Case) -> list[str]:
    cell, aim = case.ours, case.added_ms
    times = [median(cell.direct_ms), median(cell.proxy_ms), cell.added()]
    bound = ["-", ""] if aim is None else [f"<= {aim:g} ms", verdict(cell.added() <= aim)]
    return [case.name, *(f"{ms:.2f} ms" for ms in times), *bound]


def _load_row(case: Case) -> list[str]:
    cell, aim = case.ours, case.per_second
    direct, rate, cpu_ms = case.direct.median("per_second"), cell.median("per_second"), cell.median("cpu_ms")
    return [
        case.name,
        str(case.connections),
        f"{cell.median('p99_ms'):.1f} ms",
        f"{direct:,.0f}",
        f"{rate:,.0f}",
        f"{rate / direct:.2f}",
        f"{cell.median('core'):.0%}",
        f"{cpu_ms:.3f}",
        f"{1000 / cpu_ms:,.0f}",
        *(["-", ""] if aim is None else [f">= {aim:,.0f}", verdict(1000 / cpu_ms >= aim)]),
    ]
