"""The cost of an exact conversation: the time that the proxy adds to a turn of a plain OpenAI client."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.client import BadResponse, Line, Response, Rollout
from benchmarks.clocked import INSIDE, REQUEST, STAGES, read_clocks
from benchmarks.measure import Cell, Effort
from benchmarks.processes import Cores, Running, engines, pinned, proxy, redis_server, scratch_folder
from benchmarks.report import Part, Table, label, percentile, progress, verdict
from benchmarks.texts import TOOLS, Texts
from proxy.demo.checkpoint import ensure_checkpoint
from tokenization import ChatTokenizer

GROWTH = 3.0
_STORES = ("SQLite", "memory", "Redis")
_SAME, _ELSEWHERE, _RESTARTED = "", "other process", "restarted"
_REST, _TOTAL = "the rest", "proxy, total"
_RESULT_IDS, _SAMPLED_IDS, _STEP_IDS = 400, 150, 610
"""Of a tool's result, of the text before a tool call, and of both with all that is around them."""


def rows() -> list[str]:
    """Stores."""
    return list(_STORES)


@dataclass(slots=True)
class Times:
    """The turns with one store and one state of the process, by length of the conversation."""

    name: str
    cells: dict[int, Cell] = field(default_factory=lambda: defaultdict(Cell))
    windows: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Start and end of each request, in nanoseconds of CLOCK_MONOTONIC."""
    stages: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Milliseconds of each stage of each request."""

    def stage(self, name: str, length: int) -> float:
        """The median of a stage in milliseconds; 0 if it never ran."""
        return median(self.stages[length].get(name) or [0.0])

    def add_stages(self, requests: Sequence[Sequence[tuple[str, int, int]]]) -> None:
        """Find the stages of the timed requests among the spans of all requests, by their times."""
        by_start = {start: spans for spans in requests for name, start, _ in spans if name == REQUEST}
        for length, windows in self.windows.items():
            found: dict[str, list[float]] = defaultdict(list)
            for begin, end in windows:
                spans = next(spans for start, spans in sorted(by_start.items()) if begin <= start <= end)
                taken = dict.fromkeys((*STAGES, *INSIDE), 0.0)
                for name, start, stop in spans:
                    if name in taken and begin <= start and stop <= end:
                        taken[name] += (stop - start) / 1e6
                taken[_TOTAL] = (end - begin) / 1e6
                taken[_REST] = taken[_TOTAL] - sum(taken[name] for name in STAGES)
                for name, ms in taken.items():
                    found[name].append(ms)
            self.stages[length] = dict(found)


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some stores.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy does not match a conversation, or its ids are wrong.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    checkpoint, cores = ensure_checkpoint(), Cores.pick()
    tokenizer, lengths = (
        ChatTokenizer.load(checkpoint),
        [1_000, 4_000] if effort.quick else [1_000, 32_000, 128_000],
    )
    texts, renders = Texts(tokenizer), defaultdict[int, list[float]](list)
    answers, by_store = {"turn": texts.calling(_SAMPLED_IDS)}, dict[str, list[Times]]()
    with (
        scratch_folder() as folder,
        engines(cores.engine, checkpoint, answers) as (engine,),
        ExitStack() as stack,
        pinned(cores.client),
    ):
        for store in chosen:
            url = f"sqlite://{folder}/rollouts.db" if store == "SQLite" else "memory:"
            if store == "Redis":
                url = stack.enter_context(redis_server(cores.engine, folder))
            progress(f"turns: {store}: starting")
            with _bench(cores, engine, folder / store, url, texts, tokenizer) as bench:
                by_store[store] = bench.times(store, lengths, effort, renders)
    short, long = label(lengths[0]), label(lengths[-1])
    titles = [f"{quantile} {label(length)}" for length in lengths for quantile in ("p50", "p99")]
    head = ["ms added to a turn", *titles, f"{long} / {short}", f"<= {GROWTH:g}x", f"render / added, {long}"]
    added = [head, *(_row(times, lengths, renders) for rows_ in by_store.values() for times in rows_)]
    shown = [f"{percentile(renders[length], share):.2f}" for length in lengths for share in (0.5, 0.99)]
    medians = [median(renders[length]) for length in lengths]
    added.append(["render", *shown, f"{medians[-1] / medians[0]:.0f}x", "", ""])
    stages = [_stages(store, rows_, lengths) for store, rows_ in by_store.items()]
    return [added, *stages]


def _row(times: Times, lengths: list[int], renders: dict[int, list[float]]) -> list[str]:
    cells = [times.cells[length] for length in lengths]
    growth = cells[-1].added() / cells[0].added()
    shown = [f"{cell.added(share):.2f}" for cell in cells for share in (0.5, 0.99)]
    gain = median(renders[lengths[-1]]) / cells[-1].added()
    return [times.name, *shown, f"{growth:.1f}x", verdict(growth <= GROWTH), f"{gain:.1f}x"]


def _stages(store: str, rows_: Sequence[Times], lengths: list[int]) -> Table:
    """The stages with one store: by length, and for the longest also in the other states of the process."""
    same, *cold = rows_
    states = [f"{label(lengths[-1])}, {times.name.partition(', ')[2]}" for times in cold]
    table = [[f"{store}: stage, p50 in ms", *map(label, lengths), *states]]
    for name in (*STAGES, _REST, _TOTAL, *INSIDE):
        values = [same.stage(name, length) for length in lengths]
        values += [times.stage(name, lengths[-1]) for times in cold]
        if any(values):
            table.append([name, *(f"{value:.2f}" for value in values)])
    return table


@contextmanager
def _bench(
    cores: Cores, engine: int, files: Path, url: str, texts: Texts, tokenizer: ChatTokenizer
) -> Iterator["_Bench"]:
    """One proxy in front of the engine, or two if processes can share the store."""
    with ExitStack() as stack:
        running, clocks = [], []
        for number in range(1 if url == "memory:" else 2):
            clocks.append(files.with_suffix(f".{number}.clocks"))
            log = files.with_suffix(f".{number}.log")
            running.append(
                stack.enter_context(proxy(cores.proxy, [engine], log, store=url, clocks=clocks[-1]))
            )
        ports = [engine, *(each.port for each in running)]
        lines = [stack.enter_context(closing(Line(port))) for port in ports]
        yield _Bench(running, lines, clocks, texts, tokenizer)


class _Bench:
    """The proxies that share a store, with connections to the engine and to each of them."""

    def __init__(
        self,
        running: list[Running],
        lines: list[Line],
        clocks: list[Path],
        texts: Texts,
        tokenizer: ChatTokenizer,
    ) -> None:
        self._engine, self._here = lines[:2]
        self._other = lines[2] if len(lines) > 2 else None
        self._running, self._clocks, self._texts, self._tokenizer = running, clocks, texts, tokenizer

    def times(
        self, store: str, lengths: list[int], effort: Effort, renders: dict[int, list[float]]
    ) -> list[Times]:
        """Time turns after conversations of each length.

        Raises:
            BadResponse: see `measure`.
        """
        states = (_SAME, _ELSEWHERE, _RESTARTED) if self._other else (_SAME,)
        found = {state: Times(f"{store}, {state}" if state else store) for state in states}
        rounds, turns = effort.rounds or int(effort.pick(5, 1)), int(effort.pick(20, 4))
        talks = {}
        for length in lengths:
            progress(f"turns: {store}: a conversation of {length:,} tokens")
            talks[length] = self._build(length)
            self._check(self._next(self._here, talks[length]))
        for number in range(rounds):
            progress(f"turns: {store}: round {number + 1} of {rounds}")
            for length, talk in talks.items():
                for turn in range(turns):
                    self._time(self._here, self._next(self._here, talk), found[_SAME], length)
                    if self._other and turn % 4 == 0:
                        elsewhere = self._next(self._here, self._next(self._other, talk))
                        self._time(self._other, elsewhere, found[_ELSEWHERE], length)
                messages = list(map(msgspec.json.decode, self._next(self._here, talk).messages))
                for _ in range(2):
                    start = time.perf_counter_ns()
                    self._tokenizer.render(messages, tools=TOOLS)
                    renders[length].append((time.perf_counter_ns() - start) / 1e6)
        for length in lengths if self._other else ():
            for number in range(int(effort.pick(5, 1))):
                progress(f"turns: {store}: restart {number + 1} after {length:,} tokens")
                last = self._next(self._here, self._build(length))
                self._time(self._other or self._here, last, found[_RESTARTED], length)
        requests = [spans for file in self._clocks for spans in read_clocks(file)]
        for times in found.values():
            times.add_stages(requests)
        return list(found.values())

    def _build(self, tokens: int) -> Rollout:
        """Hold a conversation until the prompt of the turn after the next has about `tokens` tokens."""
        opening = self._texts.history(430, tools=True)
        talk, length = Rollout(opening, tools=TOOLS, max_tokens=512), 430
        while length + _STEP_IDS < tokens:
            response = self._here.send(talk.request())
            _expect(response, "rendered" if len(talk.messages) == len(opening) else "extended")
            talk = self._with_turn(talk, response)
            length = _STEP_IDS + sum(
                int(response.header(f"x-prompt-{p}") or 0) for p in ("reused", "appended")
            )
            length = max(length, 430 + _STEP_IDS)
        return talk

    def _next(self, line: Line, talk: Rollout) -> Rollout:
        """The conversation with one more turn, which a proxy has recorded."""
        return self._with_turn(talk, line.send(talk.request()))

    def _with_turn(self, talk: Rollout, response: Response) -> Rollout:
        longer = talk.branch()
        longer.add(response)
        longer.reply(self._texts.text(_RESULT_IDS))
        return longer

    def _time(self, line: Line, talk: Rollout, times: Times, length: int) -> None:
        request = talk.request()
        direct, proxied = self._engine.send(request), line.send(request)
        _expect(proxied, "extended")
        times.cells[length].direct_ms.append(1000 * direct.seconds)
        times.cells[length].proxy_ms.append(1000 * proxied.seconds)
        times.windows[length].append((proxied.start_ns, proxied.end_ns))

    def _check(self, talk: Rollout) -> None:
        """Compare a prompt with a rendering of its messages: in these conversations both must be equal."""
        response = (self._other or self._here).send(talk.request(return_token_ids=True))
        rendered = self._tokenizer.render(list(map(msgspec.json.decode, talk.messages)), tools=TOOLS)
        if msgspec.json.decode(response.body)["prompt_token_ids"] != rendered:
            raise BadResponse("the prompt differs from a rendering of the messages")


def _expect(response: Response, source: str) -> None:
    if response.header("x-prompt-source") != source:
        raise BadResponse(f"the prompt's source must be {source}, but the proxy returned {response.head!r}")
