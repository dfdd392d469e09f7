"""Benchmark: the cost of an append, by the length of the history. `--help` describes the measurement."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import uvloop

from benchmarks.append_report import FIRST, LENGTHS, LONG, RENDER, TEXT, Measured, Times, as_json, as_text
from benchmarks.author import Author, Messages
from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress
from benchmarks.processes import other_programs_s
from benchmarks.report import disturbance, machine
from benchmarks.ways import NEW, NEW_WITH_HISTORY, NOT_LOCAL, WAYS, Past, Way
from proxy.demo.checkpoint import TEMPLATE_FILE, ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import ChatTokenizer, TokenizationError

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
        return fail("append.py", LINUX_ONLY)
    try:
        folder = ensure_checkpoint()
        numbered = TEMPLATE_FILE.read_text("utf-8").replace(_HEADER, _NUMBERED_HEADER)
        local, not_local = ChatTokenizer.load(folder), ChatTokenizer.load(folder, numbered)
        measured = measure(local, not_local, QUICK if options.quick else FULL)
    except (DemoError, TokenizationError, WrongProof, WrongIds) as error:
        return fail("append.py", str(error))
    about = {**machine(("tokenizers", "transformers", "uvloop")), "others": f"{measured.others:.0%}"}
    text = as_text(measured, about) + disturbance(measured.others, "the cores")
    print_results(text, as_json(measured, about), options.json)
    return 0


class WrongProof(Exception):
    """A template is local and should not be, or the other way round."""


class WrongIds(Exception):
    """Appending and rendering gave different prompts, so their times cannot be compared."""


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
    first, render, text = Times(FIRST), Times(RENDER), Times(TEXT)
    start, other_programs_before_s = time.monotonic(), other_programs_s()
    for number in range(effort.rounds):
        progress(f"round {number + 1} of {effort.rounds}")
        for length, past in pasts.items():
            for way, times in zip(WAYS, appends, strict=True):
                results = author.results(effort.appends + 1, new=way.new)
                times.ms[length] += timed(partial(way.call, pasts_by_locality[way.local][length]), results)
            results = author.results(effort.appends + 1, new=True)
            text.ms[length] += timed(pasts_by_locality[False][length].text, results)
            first.ms[length] += [first_of_thread(past, author.result()) for _ in range(effort.threads)]
            render.ms[length] += timed(past.render, author.results(effort.renders + 1, new=True))
    progress("the event loop")
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
        RENDER: past.render,
    }
    waits: dict[str, list[float]] = {name: [] for name in (*calls, FIRST)}
    loop = asyncio.get_running_loop()
    for _ in range(count):
        with ThreadPoolExecutor(1) as thread:
            await loop.run_in_executor(thread, int)  # starts it
            waits[FIRST].append(await longest_wait(thread, partial(NEW.call, past, author.result())))
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


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
