"""The cost of an exact conversation: the time that the proxy adds to a turn of a plain OpenAI client."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from statistics import median

import msgspec

from benchmarks.client import BadResponse, Line, Response, Rollout
from benchmarks.measure import Cell, Effort
from benchmarks.processes import Cores, engines, pinned, proxy, redis_server, scratch_folder
from benchmarks.report import Part, label, percentile, progress, verdict
from benchmarks.texts import TOOLS, Texts
from chat_tokenizer import ChatTokenizer
from tokenproxy.demo.checkpoint import ensure_checkpoint

GROWTH = 3.0
_STORES = ("SQLite", "memory", "Redis")
_SAME, _ELSEWHERE, _RESTARTED = "", "other process", "restarted"
_RESULT_IDS, _SAMPLED_IDS, _STEP_IDS = 400, 150, 610
"""Of a tool's result, of the text before a tool call, and of both with all that is around them."""


def rows() -> list[str]:
    """Stores."""
    return list(_STORES)


Cells = dict[int, Cell]
"""Times of turns by the length of the conversation."""


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Measure some stores.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy does not match a conversation.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    checkpoint, cores = ensure_checkpoint(), Cores.pick()
    tokenizer, lengths = (
        ChatTokenizer.load(checkpoint),
        [1_000, 4_000] if effort.quick else [1_000, 32_000, 128_000],
    )
    texts, renders = Texts(tokenizer), defaultdict[int, list[float]](list)
    answers, found = {"turn": texts.calling(_SAMPLED_IDS)}, dict[str, Cells]()
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
            with ExitStack() as proxies:
                lines = [proxies.enter_context(closing(Line(engine)))]
                for number in range(1 if store == "memory" else 2):  # processes cannot share memory
                    log = folder / f"{store}.{number}.log"
                    running = proxies.enter_context(proxy(cores.proxy, [engine], log, store=url))
                    lines.append(proxies.enter_context(closing(Line(running.port))))
                found |= _Bench(lines, texts, tokenizer).times(store, lengths, effort, renders)
    short, long = label(lengths[0]), label(lengths[-1])
    titles = [f"{quantile} {label(length)}" for length in lengths for quantile in ("p50", "p99")]
    head = ["ms added to a turn", *titles, f"{long} / {short}", f"<= {GROWTH:g}x", f"render / added, {long}"]
    added = [head, *(_row(name, list(cells.values()), renders[lengths[-1]]) for name, cells in found.items())]
    shown = [f"{percentile(renders[length], share):.2f}" for length in lengths for share in (0.5, 0.99)]
    medians = [median(renders[length]) for length in lengths]
    added.append(["render", *shown, f"{medians[-1] / medians[0]:.0f}x", "", ""])
    return [added]


def _row(name: str, cells: Sequence[Cell], renders: Sequence[float]) -> list[str]:
    growth = cells[-1].added() / cells[0].added()
    shown = [f"{cell.added(share):.2f}" for cell in cells for share in (0.5, 0.99)]
    gain = median(renders) / cells[-1].added()
    return [name, *shown, f"{growth:.1f}x", verdict(growth <= GROWTH), f"{gain:.1f}x"]


class _Bench:
    """One proxy in front of the engine, or two that share a store, with connections to all of them."""

    def __init__(self, lines: list[Line], texts: Texts, tokenizer: ChatTokenizer) -> None:
        """`lines`: connections to the engine and to each proxy."""
        self._engine, self._here = lines[:2]
        self._other = lines[2] if len(lines) > 2 else None
        self._texts, self._tokenizer = texts, tokenizer

    def times(
        self, store: str, lengths: list[int], effort: Effort, renders: dict[int, list[float]]
    ) -> dict[str, Cells]:
        """Time turns after conversations of each length.

        Raises:
            BadResponse: see `measure`.
        """
        states = (_SAME, _ELSEWHERE, _RESTARTED) if self._other else (_SAME,)
        found = {state: {length: Cell() for length in lengths} for state in states}
        rounds, turns = effort.rounds or int(effort.pick(5, 1)), int(effort.pick(20, 4))
        talks = {}
        for length in lengths:
            progress(f"turns: {store}: a conversation of {length:,} tokens")
            talks[length] = self._build(length)
        for number in range(rounds):
            progress(f"turns: {store}: round {number + 1} of {rounds}")
            for length, talk in talks.items():
                for turn in range(turns):
                    self._time(self._here, self._next(self._here, talk), found[_SAME][length])
                    if self._other and turn % 4 == 0:
                        elsewhere = self._next(self._here, self._next(self._other, talk))
                        self._time(self._other, elsewhere, found[_ELSEWHERE][length])
                messages = list(map(msgspec.json.decode, self._next(self._here, talk).messages))
                for _ in range(2):
                    start = time.perf_counter_ns()
                    self._tokenizer.render(messages, tools=TOOLS)
                    renders[length].append((time.perf_counter_ns() - start) / 1e6)
        for length in lengths if self._other else ():
            for number in range(int(effort.pick(5, 1))):
                progress(f"turns: {store}: restart {number + 1} after {length:,} tokens")
                last = self._next(self._here, self._build(length))
                self._time(self._other or self._here, last, found[_RESTARTED][length])
        return {f"{store}, {state}" if state else store: cells for state, cells in found.items()}

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

    def _time(self, line: Line, talk: Rollout, cell: Cell) -> None:
        request = talk.request()
        direct, proxied = self._engine.send(request), line.send(request)
        _expect(proxied, "extended")
        cell.direct_ms.append(1000 * direct.seconds)
        cell.proxy_ms.append(1000 * proxied.seconds)


def _expect(response: Response, source: str) -> None:
    if response.header("x-prompt-source") != source:
        raise BadResponse(f"the prompt's source must be {source}, but the proxy returned {response.head!r}")
