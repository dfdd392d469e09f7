"""Benchmark: the cost of an append, by the length of the history. `--help` describes the measurement."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, Literal

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import uvloop

from benchmarks.author import RESULT_TOKENS, TOOLS, Author, Messages
from benchmarks.processes import other_programs_s
from benchmarks.report import machine, table, verdict
from proxy.demo.checkpoint import TEMPLATE_FILE, ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import Appended, ChatTokenizer, Continuation, TokenizationError

_DESCRIPTION = """\
Measure the time to append a tool result of 200 tokens to a conversation of 1k, 8k, 32k and 128k ids, and the
time to render and encode the whole conversation instead.

The model is the demo's (SmolLM2, its ChatML template), with a tool declared. The conversation is an agent's:
a question, a command, its output, an answer, and so on; it ends with a command whose output is appended.
Before the measurement the program checks that both ways give the same ids.

  append        returns the ids to append, and the whole next prompt as a list that is made when it is read.
  prompt_ids    `append`, and read that list: its copy of the existing ids grows with the history.
  continuation  returns only the ids to append: for callers that keep ids as bytes.
  new           the result is new: it is rendered and encoded.
  repeated      the result is cached.
  history=      with the messages that led to the ids, which some templates need; otherwise without. With them
                every `append` also compares what the template would have rendered instead.
  not local     the template also prints the number of each message, so that the whole history decides what is
                appended: `append` renders all of it as text. Otherwise it is proved that the last turn does.
  first of its thread
                `append, new` as the first call on a new thread; the others are later calls.
  render        the whole conversation from its messages, with the new result.
  text          the same without encoding it.

What the templates print is proved before the measurement.
Lengths are measured in rounds, so that a disturbance affects all of them; medians are compared.
Then calls at 128k run on a thread while a task on the event loop wakes up every millisecond: its longest wait
is how long other requests are blocked. `asleep` is a thread that only sleeps.

The aims: without the copy of the list, an append at 128k takes at most twice as long as at 1k; each takes at
most a hundredth of a render, and blocks the event loop for at most 5 ms. If the template is not local, an
append at 128k takes at most as long as to render the text once. A missed aim does not change the exit code:
machines differ.

Run it on an idle machine. Linux only: it reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/append.py                  measure everything: about two minutes
  python benchmarks/append.py --quick          check that it runs: ten seconds, imprecise numbers
  python benchmarks/append.py --json out.json  also write every sample to a file
"""

LENGTHS = (1_000, 8_000, 32_000, 128_000)
SHORT, LONG = LENGTHS[0], LENGTHS[-1]
GROWTH, GAIN, WAIT_MS, TEXTS = 2.0, 100.0, 5.0, 1.0
"""Aims: append at 128k / append at 1k; render / append at 128k; longest wait of the event loop; append / text
at 128k if the template is not local."""

QUIET = 0.05
"""Share of the machine's CPU time that other programs may use before a warning is printed."""

_RENDER, _FIRST, _TEXT = "render", "append, first of its thread", "text, not local"
_HEADER, _NUMBERED_HEADER = "message.role +", "message.role ~ ' ' ~ loop.index +"
"""The header of a message in the demo's template, and one that prints the message's number."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How often to measure."""

    rounds: int
    appends: int
    """Of each kind, at each length, in each round."""
    renders: int
    """At each length in each round."""
    threads: int
    """New threads whose first append is measured, at each length in each round."""
    waits: int
    """Calls of each kind during which the event loop's waits are measured."""


FULL = Effort(rounds=10, appends=20, renders=2, threads=4, waits=50)
QUICK = Effort(rounds=1, appends=5, renders=1, threads=1, waits=3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return _fail("Linux only: it reads /proc")
    try:
        folder = ensure_checkpoint()
        numbered = TEMPLATE_FILE.read_text("utf-8").replace(_HEADER, _NUMBERED_HEADER)
        local, not_local = ChatTokenizer.load(folder), ChatTokenizer.load(folder, numbered)
        measured = measure(local, not_local, QUICK if options.quick else FULL)
    except (DemoError, TokenizationError, WrongProof, WrongIds) as error:
        return _fail(str(error))
    libraries = ", ".join(f"{name} {version(name)}" for name in ("tokenizers", "transformers", "uvloop"))
    about = {**machine(), "libraries": libraries, "others": f"{measured.others:.0%}"}
    print(as_text(measured, about))
    if measured.others > QUIET:
        print(f"\nOther programs used {measured.others:.0%} of the cores: measure again on an idle machine.")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(measured, about), indent=1) + "\n")
    return 0


class WrongProof(Exception):
    """A template is local and should not be, or the other way round."""


class WrongIds(Exception):
    """Appending and rendering gave different prompts, so their times cannot be compared."""


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

    function: Literal["prompt_ids", "append", "continuation"]
    """What is called; `prompt_ids` is `append`, and a read of the list of all ids."""
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

    @property
    def grows(self) -> bool:
        """Whether it copies the ids or reads the messages, so that it takes longer after a longer history."""
        return self.function == "prompt_ids" or not self.local

    def call(self, past: Past, new: Messages) -> Appended | Continuation:
        """Append `new`."""
        history = past.messages if self.history else None
        if self.function == "continuation":
            return past.tokenizer.continuation(past.ids[-1], new, history=history, tools=TOOLS)
        appended = past.tokenizer.append(past.ids, new, history=history, tools=TOOLS)
        if self.function == "prompt_ids":
            _ = appended.prompt_ids
        return appended


NOT_LOCAL = tuple(Way("append", new, history=True, local=False) for new in (True, False))
WAYS = (
    *(
        Way(function, new, history)
        for function in ("prompt_ids", "append", "continuation")
        for new, history in product((True, False), repeat=2)
    ),
    *NOT_LOCAL,
)
NEW, NEW_WITH_HISTORY = (Way("append", new=True, history=history) for history in (False, True))
"""Also measured with the event loop, as is the first of `NOT_LOCAL`; the first one also on new threads."""


@dataclass(slots=True)
class Times:
    """Milliseconds of each call of one kind, by the length of the history."""

    name: str
    way: Way | None = None
    """None if the calls are not one of `WAYS`."""
    ms: dict[int, list[float]] = field(default_factory=lambda: {length: [] for length in LENGTHS})

    def p50(self, length: int) -> float:
        """The median of the calls."""
        return median(self.ms[length])

    @property
    def growth(self) -> float:
        """Median at 128k / median at 1k."""
        return self.p50(LONG) / self.p50(SHORT)


@dataclass(slots=True)
class Measured:
    """All results."""

    tokens: dict[int, int]
    """Number of ids of each history, by its nominal length."""
    appends: list[Times]
    render: Times
    text: Times
    """With the template that is not local."""
    waits: dict[str, list[float]]
    """Longest wait of the event loop during each call at 128k, in milliseconds."""
    others: float
    """Share of the machine's CPU time that other programs used."""

    def gain(self, times: Times) -> float:
        """Median render / median of these calls, at 128k."""
        return self.render.p50(LONG) / times.p50(LONG)

    @property
    def local(self) -> list[Times]:
        """The appends with the template that is local."""
        return [times for times in self.appends if times.way is None or times.way.local]

    @property
    def not_local(self) -> list[Times]:
        """The appends with the template that is not."""
        return [times for times in self.appends if times.way is not None and not times.way.local]

    def texts(self, times: Times, length: int) -> float:
        """Median of these calls / median text."""
        return times.p50(length) / self.text.p50(length)

    @property
    def rows(self) -> list[Times]:
        """Everything that was timed."""
        return [*self.appends, self.render, self.text]


def measure(local: ChatTokenizer, not_local: ChatTokenizer, effort: Effort) -> Measured:
    """Prove the templates, write the conversations, check that appends and renderings agree, run all rounds.

    Raises:
        WrongProof: a template is not what its parameter is called.
        WrongIds: an append and a rendering differ.
    """
    author = Author(local)
    pasts_by_locality = {True: write_pasts(local, local=True), False: write_pasts(not_local, local=False)}
    pasts = pasts_by_locality[True]
    for is_local, length in product((True, False), LENGTHS):
        ways = [way for way in WAYS if way.local is is_local]
        check_same(pasts_by_locality[is_local][length], ways, author.result())
    appends = [Times(way.name, way) for way in WAYS]
    first, render, text = Times(_FIRST), Times(_RENDER), Times(_TEXT)
    start, other_programs_before_s = time.monotonic(), other_programs_s()
    for number in range(effort.rounds):
        print(f"round {number + 1} of {effort.rounds} ...", file=sys.stderr)
        for length, past in pasts.items():
            for way, times in zip(WAYS, appends, strict=True):
                results = author.results(effort.appends + 1, new=way.new)
                times.ms[length] += timed(partial(way.call, pasts_by_locality[way.local][length]), results)
            results = author.results(effort.appends + 1, new=True)
            text.ms[length] += timed(pasts_by_locality[False][length].text, results)
            first.ms[length] += [first_of_thread(past, author.result()) for _ in range(effort.threads)]
            render.ms[length] += timed(past.render, author.results(effort.renders + 1, new=True))
    print("the event loop ...", file=sys.stderr)
    waits = uvloop.run(all_waits(pasts[LONG], pasts_by_locality[False][LONG], author, effort.waits))
    cores_s = len(os.sched_getaffinity(0)) * (time.monotonic() - start)
    tokens = {length: len(past.ids) for length, past in pasts.items()}
    others = (other_programs_s() - other_programs_before_s) / cores_s
    return Measured(tokens, [*appends, first], render, text, waits, others)


def write_pasts(tokenizer: ChatTokenizer, *, local: bool) -> dict[int, Past]:
    """Prove the template, and write a conversation of each length.

    Raises:
        WrongProof: the template is local and should not be, or the other way round.
    """
    proof, author = tokenizer.prove(), Author(tokenizer)
    if tokenizer.is_local(author.result()) is not local:
        raise WrongProof(f"after a result the {proof.after_results} decides what this template prints")
    return {length: Past(tokenizer, *author.history(length)) for length in LENGTHS}


def check_same(past: Past, ways: Sequence[Way], new: Messages) -> None:
    """Compare the prompts of these ways to append with a rendering.

    Raises:
        WrongIds: the prompts differ.
    """
    rendered = past.render(new)
    for way in ways:
        appended = way.call(past, new)
        if [*past.ids, *appended.close_ids, *appended.suffix_ids] != rendered:
            raise WrongIds(f"{way.name}: differs from a rendering, after {len(past.ids)} tokens")


def timed(call: Callable[[Messages], object], results: Sequence[Messages]) -> list[float]:
    """Milliseconds of the call with each result, except for the first, which warms up."""
    call(results[0])
    return [_ms(partial(call, result)) for result in results[1:]]


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


def first_of_thread(past: Past, new: Messages) -> float:
    """Milliseconds of an append that is the first one of a thread, without the start of the thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # starts it
        return thread.submit(_ms, partial(NEW.call, past, new)).result()


async def all_waits(past: Past, not_local: Past, author: Author, count: int) -> dict[str, list[float]]:
    """Longest waits of the event loop, in milliseconds, during `count` calls of each kind."""
    calls: dict[str, Callable[[Messages], object]] = {
        "asleep": lambda _: time.sleep(0.001),
        **{way.name: partial(way.call, past) for way in (NEW, NEW_WITH_HISTORY)},
        NOT_LOCAL[0].name: partial(NOT_LOCAL[0].call, not_local),
        _RENDER: past.render,
    }
    waits: dict[str, list[float]] = {name: [] for name in (*calls, _FIRST)}
    loop = asyncio.get_running_loop()
    for _ in range(count):
        with ThreadPoolExecutor(1) as thread:
            await loop.run_in_executor(thread, int)  # starts it
            waits[_FIRST].append(await longest_wait(thread, partial(NEW.call, past, author.result())))
            for name, call in calls.items():
                waits[name].append(await longest_wait(thread, partial(call, author.result())))
    return waits


async def longest_wait(thread: ThreadPoolExecutor, work: Callable[[], object]) -> float:
    """Longest wait in milliseconds of a task that ticks every millisecond, while `work` runs."""
    ticks: list[float] = []
    ticking = asyncio.create_task(_tick(ticks))
    await asyncio.sleep(0.005)
    before = len(ticks) - 1
    await asyncio.get_running_loop().run_in_executor(thread, work)
    await asyncio.sleep(0.005)  # for the tick that was delayed
    ticking.cancel()
    return 1000 * max(later - earlier for earlier, later in pairwise(ticks[before:]))


async def _tick(ticks: list[float]) -> None:
    while True:
        ticks.append(time.perf_counter())
        await asyncio.sleep(0.001)


def as_json(measured: Measured, about: dict[str, str]) -> dict[str, Any]:
    """All results and samples, as JSON values."""
    rows = measured.rows
    return {
        "machine": about,
        "tokens": measured.tokens,
        "aims": {"growth": GROWTH, "gain": GAIN, "wait_ms": WAIT_MS, "texts": TEXTS},
        "growth": {times.name: times.growth for times in rows},
        "gain": {times.name: measured.gain(times) for times in measured.local},
        "texts": {
            times.name: {length: measured.texts(times, length) for length in LENGTHS}
            for times in measured.not_local
        },
        "wait_ms": {name: median(waits) for name, waits in measured.waits.items()},
        "samples": {"ms": {times.name: times.ms for times in rows}, "wait_ms": measured.waits},
    }


def as_text(measured: Measured, about: dict[str, str]) -> str:
    """The results as Markdown tables, aligned for a terminal."""
    tokens = ", ".join(f"{count:,}" for count in measured.tokens.values())
    lengths = [f"{length // 1000}k" for length in LENGTHS]
    times = [
        ["ms, median, after", *lengths],
        *([row.name, *(f"{row.p50(n):.3f}" for n in LENGTHS)] for row in measured.rows),
    ]
    growth_title, gain_title = f"128k / 1k (<= {GROWTH:g}x)", f"render / append, 128k (>= {GAIN:g}x)"
    ratios = [
        ["ratio", growth_title, "", gain_title, ""],
        *(_ratio_row(row, measured.gain(row)) for row in measured.local),
        [_RENDER, f"{measured.render.growth:.0f}x", "", "", ""],
    ]
    texts = [
        ["append / text", *lengths, f"128k <= {TEXTS:g}x"],
        *(_texts_row(row, measured) for row in measured.not_local),
    ]
    loop = [
        ["event loop, during", "longest wait, median", "worst", "aim", ""],
        *(_wait_row(name, waits) for name, waits in measured.waits.items()),
    ]
    head = [
        f"{about['cores']} cores of {about['cpu']}; other programs used {about['others']} of them",
        f"Python {about['python']}, {about['libraries']}",
        f"histories of {tokens} ids; results of {RESULT_TOKENS}",
    ]
    return "\n\n".join(["\n".join(head), *map(table, (times, ratios, texts, loop))])


def _ratio_row(times: Times, gain: float) -> list[str]:
    grows = times.way is not None and times.way.grows
    growth_met = "" if grows else verdict(times.growth <= GROWTH)
    return [times.name, f"{times.growth:.2f}x", growth_met, f"{gain:,.0f}x", verdict(gain >= GAIN)]


def _texts_row(times: Times, measured: Measured) -> list[str]:
    ratios = [measured.texts(times, length) for length in LENGTHS]
    return [times.name, *(f"{ratio:.2f}x" for ratio in ratios), verdict(ratios[-1] <= TEXTS)]


def _wait_row(name: str, waits: Sequence[float]) -> list[str]:
    row = [name, f"{median(waits):.1f} ms", f"{max(waits):.1f} ms"]
    if not name.startswith("append"):
        return [*row, "-", ""]
    return [*row, f"<= {WAIT_MS:g} ms", verdict(median(waits) <= WAIT_MS)]


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=kind)
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    return parser


def _fail(message: str) -> int:
    print(f"append.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
