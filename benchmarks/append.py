"""The cost of an append: a tool result of 200 tokens to a conversation of 1k, 8k, 32k and 128k ids."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from statistics import median

import uvloop

from benchmarks.client import BadResponse
from benchmarks.measure import Effort
from benchmarks.report import Part, Table, disturbance, label, other_programs, progress, verdict
from benchmarks.texts import ANSWER_IDS, TOOLS, Messages, Texts
from proxy.demo.checkpoint import TEMPLATE_FILE, ensure_checkpoint
from tokenization import Appended, ChatTokenizer, Continuation

LENGTHS = (1_000, 8_000, 32_000, 128_000)
_SHORT, _LONG = LENGTHS[0], LENGTHS[-1]
_GROWTH, _GAIN, _WAIT_MS, _TEXTS = 2.0, 100.0, 5.0, 1.0
"""Aims: append at 128k / at 1k; render / append; longest wait of the event loop; append / text, not local."""
_RENDER, _FIRST, _TEXT = "render", "append, first of its thread", "text, not local"
_RESULT_IDS = 200
_HEADER, _NUMBERED_HEADER = "message.role +", "message.role ~ ' ' ~ loop.index +"
"""The header of a message in the demo's template, and one that prints the message's number."""


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation to append to."""

    tokenizer: ChatTokenizer
    messages: Messages
    ids: list[int]

    def render(self, new: Messages) -> list[int]:
        """The next prompt, rendered from all messages."""
        return self.tokenizer.render([*self.messages, *new], tools=TOOLS)

    def text(self, new: Messages) -> str:
        """The text of the next prompt, rendered from all messages."""
        return self.tokenizer.text([*self.messages, *new], tools=TOOLS)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to append."""

    function: str
    new: bool
    """Whether each call gets a new result; otherwise a cached one."""
    history: bool
    """Whether it gets the messages that led to the ids."""
    local: bool = True
    """Whether the template is local."""

    @property
    def name(self) -> str:
        """The row's name in the tables."""
        name = f"{self.function}, {'new' if self.new else 'repeated'}{', history=' if self.history else ''}"
        return name if self.local else f"{name}, not local"

    def call(self, past: Past, new: Messages) -> Appended | Continuation:
        """Append `new`."""
        history = past.messages if self.history else None
        if self.function == "continuation":
            return past.tokenizer.continuation(past.ids[-1], new, history=history, tools=TOOLS)
        appended = past.tokenizer.append(past.ids, new, history=history, tools=TOOLS)
        if self.function == "prompt_ids":
            _ = appended.prompt_ids
        return appended


_NOT_LOCAL = [Way("append", new, history=True, local=False) for new in (True, False)]
_LOCAL = [
    Way(function, new, history)
    for function in ("prompt_ids", "append", "continuation")
    for new, history in product((True, False), repeat=2)
]
_NEW, _NEW_WITH_HISTORY = (Way("append", new=True, history=history) for history in (False, True))
Times = dict[str, dict[int, list[float]]]
"""Milliseconds of each call of a row, by the length of the history."""


def rows() -> list[str]:
    """There is one measurement, because its rows are compared with each other."""
    return ["all ways and lengths"]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Prove the templates, write the conversations, check that appends and renderings agree, run all rounds.

    Raises:
        BadResponse: an append and a rendering differ, or a template is not local and should be.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    folder, others = ensure_checkpoint(), list[float]()
    numbered = TEMPLATE_FILE.read_text("utf-8").replace(_HEADER, _NUMBERED_HEADER)
    texts = Texts(ChatTokenizer.load(folder))
    pasts = {True: _pasts(ChatTokenizer.load(folder), texts, local=True)}
    pasts[False] = _pasts(ChatTokenizer.load(folder, numbered), texts, local=False)
    for way, length in product([*_LOCAL, *_NOT_LOCAL], LENGTHS):
        _check_same(pasts[way.local][length], way, texts.result(_RESULT_IDS))
    times: Times = defaultdict(lambda: defaultdict(list))
    rounds = effort.rounds or int(effort.pick(10, 1))
    with other_programs(others):
        for number in range(rounds):
            progress(f"append: round {number + 1} of {rounds}")
            for length in LENGTHS:
                _one_round(times, pasts[True][length], pasts[False][length], length, texts, effort)
        progress("append: the event loop")
        waits = uvloop.run(_waits(pasts[True][_LONG], pasts[False][_LONG], texts, int(effort.pick(50, 3))))
    return [*_tables(times), _wait_table(waits), disturbance(others[0], "the cores")]


def _pasts(tokenizer: ChatTokenizer, texts: Texts, *, local: bool) -> dict[int, Past]:
    tokenizer.prove()
    if tokenizer.is_local(texts.result(_RESULT_IDS)) is not local:
        raise BadResponse(f"the template is {'not ' if local else ''}local")
    pasts = {}
    for length in LENGTHS:
        messages = texts.history(length - ANSWER_IDS - 60, tools=True)
        messages.append(texts.calling(ANSWER_IDS).message)
        ids = tokenizer.render(messages, tools=TOOLS, add_generation_prompt=False)
        pasts[length] = Past(tokenizer, messages, texts.until_stop(ids))
    return pasts


def _check_same(past: Past, way: Way, new: Messages) -> None:
    appended = way.call(past, new)
    if [*past.ids, *appended.close_ids, *appended.suffix_ids] != past.render(new):
        raise BadResponse(f"{way.name}: differs from a rendering, after {len(past.ids)} tokens")


def _one_round(times: Times, local: Past, not_local: Past, length: int, texts: Texts, effort: Effort) -> None:
    count = int(effort.pick(20, 5))

    def timed(name: str, call: Callable[[Messages], object], calls: int, *, new: bool = True) -> None:
        """Time the call with each result, except for the first, which warms up."""
        results = [texts.result(_RESULT_IDS)] * (calls + 1)
        if new:
            results = [texts.result(_RESULT_IDS) for _ in range(calls + 1)]
        call(results[0])
        times[name][length] += [_ms(partial(call, result)) for result in results[1:]]

    for way in (*_LOCAL, *_NOT_LOCAL):
        timed(way.name, partial(way.call, local if way.local else not_local), count, new=way.new)
    for _ in range(int(effort.pick(4, 1))):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(int).result()  # starts it
            call = partial(_NEW.call, local, texts.result(_RESULT_IDS))
            times[_FIRST][length].append(thread.submit(_ms, call).result())
    timed(_RENDER, local.render, int(effort.pick(2, 1)))
    timed(_TEXT, not_local.text, count)


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


async def _waits(past: Past, not_local: Past, texts: Texts, count: int) -> dict[str, list[float]]:
    """Longest waits of the event loop, in milliseconds, during `count` calls of each kind."""
    calls: dict[str, Callable[[Messages], object]] = {
        "asleep": lambda _: time.sleep(0.001),
        **{way.name: partial(way.call, past) for way in (_NEW, _NEW_WITH_HISTORY)},
        _NOT_LOCAL[0].name: partial(_NOT_LOCAL[0].call, not_local),
        _RENDER: past.render,
    }
    waits: dict[str, list[float]] = {name: [] for name in (*calls, _FIRST)}
    for _ in range(count):
        with ThreadPoolExecutor(1) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, int)  # starts it
            for name, call in ((_FIRST, calls[_NEW.name]), *calls.items()):
                waits[name].append(await _longest_wait(thread, partial(call, texts.result(_RESULT_IDS))))
    return waits


async def _longest_wait(thread: ThreadPoolExecutor, work: Callable[[], object]) -> float:
    """Longest wait in milliseconds of a task that ticks every millisecond, while `work` runs."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.005)
    before = len(ticks) - 1
    await asyncio.get_running_loop().run_in_executor(thread, work)
    await asyncio.sleep(0.005)  # for the tick that was delayed
    ticking.cancel()
    return 1000 * max(later - earlier for earlier, later in pairwise(ticks[before:]))


def _tables(times: Times) -> list[Table]:
    p50 = {name: {n: median(ms) for n, ms in by_length.items()} for name, by_length in times.items()}
    local, lengths = [way.name for way in _LOCAL] + [_FIRST], list(map(label, LENGTHS))
    order = [*(way.name for way in (*_LOCAL, *_NOT_LOCAL)), _FIRST, _RENDER, _TEXT]
    table = [["ms, median, after", *lengths]]
    table += [[name, *(f"{p50[name][n]:.3f}" for n in LENGTHS)] for name in order]
    growth = {name: p50[name][_LONG] / p50[name][_SHORT] for name in order}
    ratios = [["ratio", f"128k / 1k (<= {_GROWTH:g}x)", "", f"render / append, 128k (>= {_GAIN:g}x)", ""]]
    for name in local:
        gain = p50[_RENDER][_LONG] / p50[name][_LONG]
        met = "" if name.startswith("prompt_ids") else verdict(growth[name] <= _GROWTH)  # it copies the list
        ratios.append([name, f"{growth[name]:.2f}x", met, f"{gain:,.0f}x", verdict(gain >= _GAIN)])
    ratios.append([_RENDER, f"{growth[_RENDER]:.0f}x", "", "", ""])
    texts = [["append / text", *lengths, f"128k <= {_TEXTS:g}x"]]
    for way in _NOT_LOCAL:
        shares = [p50[way.name][n] / p50[_TEXT][n] for n in LENGTHS]
        texts.append([way.name, *(f"{share:.2f}x" for share in shares), verdict(shares[-1] <= _TEXTS)])
    return [table, ratios, texts]


def _wait_table(waits: dict[str, list[float]]) -> Table:
    table = [["event loop, during", "longest wait, median", "worst", "aim", ""]]
    for name, ms in waits.items():
        aim = (
            [f"<= {_WAIT_MS:g} ms", verdict(median(ms) <= _WAIT_MS)]
            if name.startswith("append")
            else ["-", ""]
        )
        table.append([name, f"{median(ms):.1f} ms", f"{max(ms):.1f} ms", *aim])
    return table
