"""The cost of an append: a tool result of 200 tokens to a conversation of 1k, 8k, 32k and 128k ids."""

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import uvloop

from benchmarks.client import BadResponse
from benchmarks.measure import Effort
from benchmarks.report import Part, Table, label, progress, verdict
from benchmarks.texts import ANSWER_IDS, TOOLS, Messages, Texts
from chat_tokenizer import Appended, ChatTokenizer
from chat_tokenizer.renderer import RenderOptions
from tokenproxy.app.server import SWITCH_S
from tokenproxy.demo.checkpoint import TEMPLATE_FILE, ensure_checkpoint

LENGTHS = (1_000, 8_000, 32_000, 128_000)
_SHORT, _LONG = LENGTHS[0], LENGTHS[-1]
_GROWTH, _GAIN, _WAIT_MS, _TEXTS = 2.0, 100.0, 5.0, 1.0
"""Aims: append at 128k / at 1k; render / append; longest wait of the event loop; append, history / text."""
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

    def append(self, new: Messages) -> Appended:
        """Append, with the messages that led to the ids."""
        return self.tokenizer.append(self.ids, new, history=self.messages, tools=TOOLS)

    def append_alone(self, new: Messages) -> Appended:
        """Append without these messages."""
        return self.tokenizer.append(self.ids, new, tools=TOOLS)

    def prompt_ids(self, new: Messages) -> Appended:
        """Append, and make the list of the whole prompt's ids."""
        appended = self.append(new)
        _ = appended.prompt_ids
        return appended


_FUNCTIONS: dict[str, Callable[[Past, Messages], object]] = {
    "prompt_ids, {}, history=": Past.prompt_ids,
    "append, {}, history=": Past.append,
    "append, {}": Past.append_alone,
}
_ASKING = "append, new, history=, engine renders"
_LOCAL = {name.format(result): call for name, call in _FUNCTIONS.items() for result in ("new", "repeated")}
"""Ways to append, by the names of their rows: a new result in each call, or a cached one."""
_NOT_LOCAL = {"append, new, history=, not local": Past.append}
Times = dict[str, dict[int, list[float]]]
"""Milliseconds of each call of a row, by the length of the history."""


def rows() -> list[str]:
    """There is one measurement, because its rows are compared with each other."""
    return ["all ways and lengths"]


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Prove the templates, write the conversations, run all rounds.

    Raises:
        BadResponse: a template is not local and should be, or the other way round.
        TokenizationError, DemoError: the demo's model cannot be loaded.
    """
    folder = ensure_checkpoint()
    numbered = TEMPLATE_FILE.read_text("utf-8").replace(_HEADER, _NUMBERED_HEADER)
    texts = Texts(ChatTokenizer.load(folder))
    local = _pasts(ChatTokenizer.load(folder), texts, local=True)
    not_local = _pasts(ChatTokenizer.load(folder, numbered), texts, local=False)
    engine, renderings = ChatTokenizer.load(folder), Counter[str]()

    def render(messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> list[int]:
        renderings["all"] += 1
        generates = options.add_generation_prompt
        return engine.render(messages, tools=options.tools, add_generation_prompt=generates)

    asking = _pasts(engine.rendered_by_engine(render, b""), texts, local=True)
    renderings.clear()  # those of the proof
    times: Times = defaultdict(lambda: defaultdict(list))
    rounds = effort.rounds or int(effort.pick(10, 1))
    for number in range(rounds):
        progress(f"append: round {number + 1} of {rounds}")
        for length in LENGTHS:
            _one_round(times, local[length], not_local[length], length, texts, effort)
            _timed(times[_ASKING][length], asking[length].append, _new(texts, effort))
    appends = sum(map(len, times[_ASKING].values()))
    asked = [[_ASKING, "renderings"], [f"{appends:,} appends", f"{renderings['all']:,}"]]
    progress("append: the event loop")
    sys.setswitchinterval(SWITCH_S)  # as the server does
    waits = uvloop.run(_waits(local[_LONG], not_local[_LONG], texts, int(effort.pick(50, 3))))
    return [*_tables(times), asked, _wait_table(waits)]


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


def _one_round(times: Times, local: Past, not_local: Past, length: int, texts: Texts, effort: Effort) -> None:
    for ways, past in ((_LOCAL, local), (_NOT_LOCAL, not_local)):
        for name, call in ways.items():
            new = _new(texts, effort)
            repeated = [new[0]] * len(new)
            _timed(times[name][length], partial(call, past), repeated if "repeated" in name else new)
    _timed(times[_RENDER][length], local.render, _new(texts, effort)[: int(effort.pick(3, 2))])
    _timed(times[_TEXT][length], not_local.text, _new(texts, effort))


def _new(texts: Texts, effort: Effort) -> list[Messages]:
    """A result for each call."""
    return [texts.result(_RESULT_IDS) for _ in range(int(effort.pick(21, 6)))]


def _timed(times: list[float], call: Callable[[Messages], object], results: Sequence[Messages]) -> None:
    """Time the call with each result, except for the first, which warms up."""
    call(results[0])
    times += [_ms(partial(call, result)) for result in results[1:]]


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


async def _waits(past: Past, not_local: Past, texts: Texts, count: int) -> dict[str, list[float]]:
    """Longest waits of the event loop, in milliseconds, during `count` calls of each kind."""
    calls: dict[str, Callable[[Messages], object]] = {
        _FIRST: past.append_alone,
        "asleep": lambda _: time.sleep(0.001),
        "append, new": past.append_alone,
        "append, new, history=": past.append,
        "append, new, history=, not local": not_local.append,
        _RENDER: past.render,
    }
    waits: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        with ThreadPoolExecutor(1) as thread:
            await asyncio.get_running_loop().run_in_executor(thread, int)  # starts it
            for name, call in calls.items():
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
    p50 = {name: {n: median(times[name][n]) for n in LENGTHS} for name in times}
    lengths = [label(length) for length in LENGTHS]
    growth, gain = f"128k / 1k (<= {_GROWTH:g}x)", f"render / append, 128k (>= {_GAIN:g}x)"
    table = [["ms, median, after", *lengths, growth, "", gain, ""]]
    for name, of in p50.items():
        grown, gained = of[_LONG] / of[_SHORT], p50[_RENDER][_LONG] / of[_LONG]
        ratios = [f"{grown:.2f}x", "", "", ""]
        if name in _LOCAL and "history=" not in name:  # with a history, all of its text is rendered
            ratios[1:] = [verdict(grown <= _GROWTH), f"{gained:,.0f}x", verdict(gained >= _GAIN)]
        table.append([name, *(f"{of[n]:.3f}" for n in LENGTHS), *ratios])
    texts = [["append / text", *lengths, f"128k <= {_TEXTS:g}x"]]
    for name in ("append, new, history=", *_NOT_LOCAL):
        shares = [p50[name][n] / p50[_TEXT][n] for n in LENGTHS]
        texts.append([name, *(f"{share:.2f}x" for share in shares), verdict(shares[-1] <= _TEXTS)])
    return [table, texts]


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
