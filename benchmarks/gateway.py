"""tokenproxy and other gateways in front of the same engine, which answers with fixed bytes at once."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import mean

from benchmarks.client import BadResponse
from benchmarks.loads import (
    COLUMNS,
    FEW_GIVEN_IDS,
    FIRST_TURN,
    GIVEN_IDS,
    LONG_ANSWER,
    LONG_BOTH,
    MESSAGES_STREAM,
    RECOGNISED,
    RESPONSES_STREAM,
    SMALL_CHAT,
    STREAM,
    Load,
    Loads,
    gateway_loads,
)
from benchmarks.measure import CONNECTIONS, Bench, Cell, Effort, Target
from benchmarks.peers import PEERS, RLLM, ROUTER, run_peer
from benchmarks.processes import Cores, StartError, engines, pinned, proxy, redis_server, scratch_folder
from benchmarks.report import Part, Table, disturbance, progress, verdict
from proxy.demo.checkpoint import ensure_checkpoint
from tokenization import ChatTokenizer

DIRECT, OURS = "direct, no gateway", "tokenproxy, SQLite"
_GATEWAYS = (DIRECT, OURS, *(peer.title for peer in PEERS))
_RECORDED = (SMALL_CHAT, FIRST_TURN, STREAM, MESSAGES_STREAM, RESPONSES_STREAM)
_REQUESTS = (
    *(f"{name}, recorded" for name in _RECORDED),
    *(f"{name}, {kind}" for name in (FEW_GIVEN_IDS, GIVEN_IDS) for kind in ("not recorded", "recorded")),
)
STORES = ("SQLite", "Redis", "memory")
WHOLE, STREAMED = "whole", "streamed"
RESTARTED, RESTARTED_STREAMED = "restarted", "restarted, streamed"
_ROOMY = ("--store-max-bytes", str(8 << 30), "--cache-bytes", str(2 << 30))
"""Nothing is evicted: 1,000 conversations of 128k ids take more than the defaults."""
_LEAST_RATES = (
    *zip((SMALL_CHAT, FIRST_TURN, LONG_ANSWER, RECOGNISED, STREAM, GIVEN_IDS), [ROUTER.title] * 6,
         (0.25, 0.3, 0.3, 0.35, 0.7, 10.0), strict=True),
    *((column, RLLM.title, 20.0) for column in (SMALL_CHAT, FIRST_TURN, LONG_ANSWER, LONG_BOTH, STREAM)),
)  # fmt: skip
"""Goals: least ratio of tokenproxy's rate to that of another gateway, by column."""
_MOST_GROWTH = ((WHOLE, 1.5), (RESTARTED, 4.0))
"""Goals: most ratio of the added p50 at 128k ids to that at 1k, by state."""


@dataclass(slots=True)
class Results:
    """Everything that was measured."""

    compared: dict[tuple[str, str], Cell] = field(default_factory=dict)
    """By column and gateway."""
    requests: dict[str, Cell] = field(default_factory=dict)
    conversations: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    """By store, state and length."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why gateways and stores were not measured at all."""

    def ratio(self, column: str, gateway: str) -> float | None:
        """tokenproxy's rate on a full core / that of another gateway; None if one was not measured."""
        ours, theirs = self.compared.get((column, OURS)), self.compared.get((column, gateway))
        if ours is None or theirs is None or not ours.samples or not theirs.samples:
            return None
        return theirs.median("cpu_ms") / ours.median("cpu_ms")


def rows() -> list[str]:
    """Columns with gateways, and the rows of the other tables."""
    compared = [f"{column}/{gateway}" for column in COLUMNS for gateway in _GATEWAYS]
    return [*compared, *(f"requests/{name}" for name in _REQUESTS), *(f"conversations/{s}" for s in STORES)]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some cells.

    Raises:
        StartError: the engine or tokenproxy does not start.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    pairs = [(row.partition("/")[0], row.partition("/")[2]) for row in chosen]
    lengths = {"1k": 1_000, "32k": 32_000} | ({} if effort.quick else {"128k": 128_000})
    checkpoint, cores, results = ensure_checkpoint(), Cores.pick(), Results()
    progress("gateway: write the requests")
    loads = gateway_loads(ChatTokenizer.load(checkpoint), int(effort.pick(1000, 100)), lengths)
    with (
        scratch_folder() as folder,
        engines(cores.engine, checkpoint, loads.answers) as (port,),
        pinned(cores.client),
    ):
        run = _Run(Bench(port, loads), cores, folder, effort, results)
        run.gateways([pair for pair in pairs if pair[0] in COLUMNS], [b for a, b in pairs if a == "requests"])
        for store in (b for a, b in pairs if a == "conversations"):
            try:
                run.conversations(store)
            except (BadResponse, StartError) as error:
                results.absent[store] = str(error)
    return _parts(results, loads)


class _Run:
    """One run of the benchmark."""

    def __init__(self, bench: Bench, cores: Cores, folder: Path, effort: Effort, results: Results) -> None:
        self._bench, self._cores, self._folder, self._results = bench, cores, folder, results
        self._rounds, self._samples = effort.rounds or int(effort.pick(3, 1)), int(effort.pick(100, 10))
        self._seconds = effort.seconds or effort.pick(2.0, 0.3)

    def gateways(self, pairs: Sequence[tuple[str, str]], requests: Sequence[str]) -> None:
        """Measure columns through gateways, and tokenproxy's own requests; all of them alternate."""
        bench, results = self._bench, self._results
        names = dict.fromkeys(gateway for _, gateway in pairs) | (dict.fromkeys([OURS]) if requests else {})
        results.compared = {pair: Cell() for pair in pairs}
        results.requests = {name: Cell() for name in requests}
        with self._started(list(names)) as targets:
            for (column, gateway), cell in results.compared.items():
                if gateway in targets:
                    with cell.problems():
                        self._prepare(
                            cell, targets[gateway], bench.loads.columns[column].load(gateway == OURS)
                        )
            for number in range(self._rounds):
                progress(f"gateway: round {number + 1} of {self._rounds}")
                for (column, gateway), cell in results.compared.items():
                    load = bench.loads.columns[column].load(gateway == OURS)
                    if gateway in targets and not cell.problem:
                        with cell.problems():
                            bench.under_load(cell, targets[gateway], load, self._seconds)
                for name, cell in results.requests.items():
                    column_, _, kind = name.partition(", ")
                    ours, theirs = (bench.loads.columns[column_].load(flag) for flag in (True, False))
                    if column_ in (FEW_GIVEN_IDS, GIVEN_IDS):
                        ours = replace(ours, sessions=kind == "recorded")
                    self._round(cell, targets[OURS], (theirs, ours))

    def _prepare(self, cell: Cell, target: Target, load: Load) -> None:
        self._bench.check(cell, target, load, self._seconds)
        if load.conversations and target.ours:
            progress(f"gateway: start {load.conversations:,} conversations")
            self._bench.begin(target, load)
        elif load.conversations:
            target.positions[load.answer] = load.conversations  # the others are sent the same later turns

    def _round(self, cell: Cell, target: Target, loads: tuple[Load, Load]) -> None:
        """Sequential requests, then load."""
        if not cell.problem:
            with cell.problems():
                self._bench.sequential(cell, target, loads, self._samples)
                self._bench.under_load(cell, target, loads[1], self._seconds)

    @contextmanager
    def _started(self, names: Sequence[str]) -> Iterator[dict[str, Target]]:
        """Start gateways by name."""
        port, targets = self._bench.engine.port, {DIRECT: self._bench.engine}
        with ExitStack() as stack:
            if OURS in names:
                running = stack.enter_context(proxy(self._cores.proxy, [port], self._folder / "proxy.log"))
                targets[OURS] = Target(OURS, running.port, running, ours=True)
            for peer in (peer for peer in PEERS if peer.title in names):
                progress(f"gateway: start {peer.title}")
                try:
                    running = stack.enter_context(run_peer(peer, self._cores.proxy, port, self._folder))
                    targets[peer.title] = Target(peer.title, running.port, running, prefix=peer.prefix)
                except StartError as error:
                    self._results.absent[peer.title] = str(error)
                    print(f"{peer.title}: {error}", file=sys.stderr)
            yield targets

    def conversations(self, store: str) -> None:
        """Measure recognised turns with a store; the lengths alternate.

        Raises:
            BadResponse: a response is an error.
            StartError: a process does not start, or Redis is not installed.
        """
        loads, cells, bench = self._bench.loads.conversations, self._results.conversations, self._bench
        (self._folder / store).mkdir()
        with ExitStack() as stack:
            base = f"sqlite://{self._folder}/{store}"
            if store == "Redis":
                redis = stack.enter_context(redis_server(self._cores.engine, self._folder / store))
                base = redis.rpartition("/")[0]
            ends = {"Redis": "/{0}", "SQLite": "/{1}.db"}
            urls = {
                length: base + ends[store].format(number, length) if store in ends else "memory:"
                for number, length in enumerate(loads)
            }
            with self._proxies(store, urls) as targets:
                for length, target in targets.items():
                    progress(f"gateway: {store}: start conversations of {length} ids")
                    bench.begin(target, loads[length][False])
                for number in range(self._rounds):
                    progress(f"gateway: {store}: round {number + 1} of {self._rounds}")
                    for length, target in targets.items():
                        for state, stream in ((WHOLE, False), (STREAMED, True)):
                            cell = cells.setdefault((store, state, length), Cell())
                            self._round(cell, target, (loads[length][stream],) * 2)
                positions = {length: dict(target.positions) for length, target in targets.items()}
            if store == "memory":
                return
            with self._proxies(store, urls) as targets:
                for length, target in targets.items():
                    progress(f"gateway: {store}: restarted, {length} ids")
                    warm_up = bench.loads.columns[SMALL_CHAT].ours
                    bench.sequential(Cell(), target, (warm_up, warm_up), 20)
                    target.positions.update(positions[length])
                    for state, stream in ((RESTARTED, False), (RESTARTED_STREAMED, True)):
                        cell, load = cells.setdefault((store, state, length), Cell()), loads[length][stream]
                        count = min(self._rounds * self._samples, load.conversations // 2)
                        bench.sequential(cell, target, (load, load), count)

    @contextmanager
    def _proxies(self, store: str, urls: dict[str, str]) -> Iterator[dict[str, Target]]:
        """One tokenproxy for each length, so that none has conversations of another length in its cache."""
        with ExitStack() as stack:
            targets = {}
            for length, url in urls.items():
                log, port = self._folder / store / f"{length}.log", self._bench.engine.port
                running = stack.enter_context(proxy(self._cores.proxy, [port], log, *_ROOMY, store=url))
                targets[length] = Target(store, running.port, running, ours=True)
            yield targets


def _parts(results: Results, loads: Loads) -> list[Part]:
    parts: list[Part] = []
    if results.compared:
        parts += _compared(results, loads)
    if results.requests:
        parts.append(_requests(results.requests))
    if results.conversations:
        parts += _conversations(results.conversations, list(loads.conversations))
    return [*parts, *_remarks(results), _goals(results)]


def _compared(results: Results, loads: Loads) -> Iterator[Table]:
    cells = results.compared
    columns = list(dict.fromkeys(column for column, _ in cells))
    gateways = [name for name in _GATEWAYS if any(gateway == name for _, gateway in cells)]
    measured = [name for name in gateways if name != DIRECT]
    titles = [f"{column}, chunks" if loads.columns[column].chunks else column for column in columns]

    def grid(title: str, names: Sequence[str], text: Callable[[Cell, str], str], head: list[str]) -> Table:
        lines = [[title, *head]]
        for name in names:
            row = []
            for column in columns:
                cell = cells.get((column, name))
                failed = "not started" if name in results.absent else "-" if cell is None else "failed"
                row.append(text(cell, column) if cell is not None and cell.samples else failed)
            lines.append([name, *row])
        return lines

    def rate(cell: Cell, column: str) -> str:
        per_second = cell.median("per_second") * (loads.columns[column].chunks or 1)
        return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"

    yield grid("responses/s on one core", gateways, rate, titles)
    others = [name for name in measured if name != OURS]
    if others:
        yield [
            ["tokenproxy's rate / that of", *columns],
            *([name, *(_times(results.ratio(column, name)) for column in columns)] for name in others),
        ]
    yield grid("CPU ms of a request", measured, lambda cell, _: f"{cell.median('cpu_ms'):.3f}", titles)
    p99 = f"p99 on {CONNECTIONS} connections, ms"
    yield grid(p99, gateways, lambda cell, _: f"{cell.median('p99_ms'):,.1f}", titles)
    writing = [name for name in measured if any(_writes(cells.get((column, name))) for column in columns)]
    if writing:
        yield grid(
            "KB written per turn", writing, lambda cell, _: f"{cell.median('written_kb'):,.1f}", titles
        )


def _writes(cell: Cell | None) -> bool:
    return cell is not None and bool(cell.samples) and cell.median("written_kb") >= 1


def _requests(requests: dict[str, Cell]) -> Table:
    head = ["tokenproxy's requests", "added p50", "added p99", "responses/s", "CPU ms", "KB written per turn"]
    lines = [head]
    for name, cell in requests.items():
        times = [f"{cell.added(share):.2f} ms" if cell.proxy_ms else "-" for share in (0.5, 0.99)]
        load = ["failed"] * 3
        if cell.samples:
            load = [f"{cell.median('per_second'):,.0f}", f"{cell.median('cpu_ms'):.3f}"]
            load.append(f"{cell.median('written_kb'):,.1f}")
        lines.append([name, *times, *load])
    return lines


def _conversations(cells: dict[tuple[str, str, str], Cell], lengths: list[str]) -> Iterator[Table]:
    titles = [f"{quantile} {length}" for length in lengths for quantile in ("p50", "p99")]
    added = [["ms added to a recognised turn", *titles, f"{lengths[-1]} / {lengths[0]}"]]
    loaded = [f"{what} {length}" for length in lengths for what in ("turns/s", "CPU ms", "KB", "recognised")]
    load = [["recognised turns under load", *loaded]]
    for store, state in dict.fromkeys((store, state) for store, state, _ in cells):
        row = [cells[store, state, length] for length in lengths]
        if not all(cell.proxy_ms for cell in row):
            continue
        name = store if state == WHOLE else f"{store}, {state}"
        times = [f"{cell.added(share):.2f}" for cell in row for share in (0.5, 0.99)]
        added.append([name, *times, f"{row[-1].added() / row[0].added():.1f}x"])
        if all(cell.samples for cell in row):
            load.append([name, *chain.from_iterable(map(_loaded, row))])
    yield added
    yield load


def _loaded(cell: Cell) -> list[str]:
    values = f"{cell.median('per_second'):,.0f}", f"{cell.median('cpu_ms'):.2f}"
    return [*values, f"{cell.median('written_kb'):,.1f}", f"{cell.median('extended'):.1%}"]


def _remarks(results: Results) -> list[str]:
    """What was not measured, or not like the others."""
    compared = {f"{gateway}, {column}": cell for (column, gateway), cell in results.compared.items()}
    conversations = {", ".join(key): cell for key, cell in results.conversations.items()}
    cells = compared | results.requests | conversations
    lines = [f"- {name}: {_short(problem)}" for name, problem in results.absent.items()]
    lines += [f"- {name}: {_short(cell.problem)}" for name, cell in cells.items() if cell.problem]
    lines += [f"- {name}: responses {cell.note}" for name, cell in cells.items() if cell.note]
    for name, cell in cells.items():
        if cell.samples and cell.connections < CONNECTIONS:
            lines.append(f"- {name}: loaded on {cell.connections} of {CONNECTIONS} connections")
    others = [sample.others for cell in cells.values() for sample in cell.samples]
    return [*(["\n".join(lines)] if lines else []), *([disturbance(mean(others))] if others else [])]


def _short(problem: str) -> str:
    lines = [line for line in problem.splitlines() if line.strip()]
    return f"{lines[0]} ... {lines[-1]}" if len(lines) > 1 else problem.strip()


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def _goals(results: Results) -> Table:
    """What was measured next to the least or most that is aimed at."""

    def added(of: dict[str, Cell], name: str) -> float | None:
        return of[name].added() if name in of and of[name].proxy_ms else None

    def ratio(value: float | None, by: float | None) -> float | None:
        return None if value is None or by is None else value / by

    lines = [["goal", "measured", "goal", ""]]

    def add(name: str, value: float | None, bound: float, unit: str, *, least: bool = False) -> None:
        met = None if value is None else value >= bound if least else value <= bound
        shown = "not measured" if value is None else f"{value:.2f}{unit}"
        lines.append([name, shown, f"{'>=' if least else '<='} {bound:g}{unit}", verdict(met)])

    for column, gateway, bound in _LEAST_RATES:
        add(f"{column}: rate / that of {gateway}", results.ratio(column, gateway), bound, "x", least=True)
    turns = {", ".join(key): cell for key, cell in results.conversations.items()}
    for store in STORES:
        for state, bound in _MOST_GROWTH if store != "memory" else _MOST_GROWTH[:1]:
            long, short = (added(turns, f"{store}, {state}, {length}") for length in ("128k", "1k"))
            name = f"recognised turn, {store}, {state}: added p50 at 128k ids / at 1k"
            add(name, ratio(long, short), bound, "x")
    chat, route = (added(results.requests, f"{SMALL_CHAT}, recorded"),
                   added(results.requests, f"{FEW_GIVEN_IDS}, not recorded"))  # fmt: skip
    more = None if chat is None or route is None else chat - route
    add(f"{SMALL_CHAT}, recorded: added p50 - that of {FEW_GIVEN_IDS}, not recorded", more, 0.2, " ms")
    stream = added(results.requests, f"{STREAM}, recorded")
    for name in (MESSAGES_STREAM, RESPONSES_STREAM):
        value = ratio(added(results.requests, f"{name}, recorded"), stream)
        add(f"{name}: added p50 / that of {STREAM}, recorded", value, 2.0, "x")
    first = results.compared.get((FIRST_TURN, OURS))
    written = first.median("written_kb") if first is not None and first.samples else None
    add(f"{FIRST_TURN}: written per turn", written, 100.0, " KB")
    return lines
