"""Benchmark: the cost of keeping plain OpenAI conversations exact. `--help` describes the measurement."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.author import TOOLS, Author
from benchmarks.clocked import read_clocks
from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress, scratch_folder
from benchmarks.load import BadResponse
from benchmarks.processes import Cores, Proxy, StartError, noop_engine, pinned, proxy, redis_server
from benchmarks.report import (
    ELSEWHERE,
    RESTARTED,
    SAME,
    Measured,
    Times,
    disturbance,
    machine,
    turns_json,
    turns_text,
)
from benchmarks.talk import Connection, Conversation, build_conversation, check_exact, expect
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import ChatTokenizer, TokenizationError

_DESCRIPTION = """\
Measure the time that the proxy's `POST /v1/chat/completions` adds to a turn of a conversation: it matches
the conversation, sends its recorded ids with the new ids after them, and records the completion.

The conversation is an agent's: a question, then turns of some 200 sampled tokens with a tool call, each
followed by a result of 400 tokens, until the prompt has about 1k, 32k and 128k tokens. The client is plain
OpenAI: it sends all messages each time, and requests no ids. The engine does nothing: it returns the ids
that it was sent and a canned turn with ids and log-probabilities, as vLLM does. Engine and client share a
core, the proxy has another. Each timed request is sent to the engine itself and to the proxy:

  added         median through the proxy minus direct median. The direct engine gets messages and renders
               nothing. Through the proxy it also gets ids and returns them: this is part of the added time.
  render        the engine's work without the proxy: render and encode the whole conversation.
  SQLite, ...   the proxy's store. Redis is measured if a redis-server is installed.
  other process the turn before was recorded by another process that shares the store; this one had the one
                before that.
  restarted     the process has no turn of the conversation cached: all are read from the store.

Every turn continues one that was recorded just before, and no two are equal. Once for each store and
length the program checks that the prompt has the ids of a rendering. The other tables show the stages, timed
inside the proxy; `the rest` is HTTP, hand-overs between threads, and the client.

The aim: the time added at 128k tokens is at most three times the time added at 1k. A missed aim does not
change the exit code: machines differ.

Run it on an idle machine. Linux only: it pins processes to cores and reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/transparent.py                  measure everything: about three minutes
  python benchmarks/transparent.py --store SQLite   measure one store
  python benchmarks/transparent.py --quick          check that it runs: half a minute, imprecise numbers
  python benchmarks/transparent.py --json out.json  also write every sample to a file
"""

STORES = ("SQLite", "memory", "Redis")


@dataclass(frozen=True, slots=True)
class Effort:
    """How often to measure, for each length and store."""

    lengths: tuple[int, ...]
    rounds: int
    turns: int
    """Per round, in a process that has the conversation cached; a quarter as many in another process."""
    restarts: int
    """In total."""
    renders: int
    """Per round."""


FULL = Effort(lengths=(1_000, 32_000, 128_000), rounds=5, turns=20, restarts=5, renders=2)
QUICK = Effort(lengths=(1_000, 4_000), rounds=1, turns=4, restarts=1, renders=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("transparent.py", LINUX_ONLY)
    try:
        folder = ensure_checkpoint()
        measured = measure(folder, options.store or STORES, QUICK if options.quick else FULL)
    except (DemoError, TokenizationError, StartError, BadResponse) as error:
        return fail("transparent.py", str(error))
    about = {**machine(("uvicorn", "aiohttp", "msgspec", "tokenizers")), "others": f"{measured.others:.0%}"}
    text = turns_text(measured, about) + disturbance(measured.others, "the proxy's core")
    print_results(text, turns_json(measured, about), options.json)
    return 0


def measure(checkpoint: Path, stores: Sequence[str], effort: Effort) -> Measured:
    """Hold the conversations with each store, and time their next turns.

    Raises:
        StartError: a process does not start.
        BadResponse: the proxy does not match a conversation, or its ids are wrong.
    """
    measured = Measured(list(effort.lengths))
    cores = Cores.pick()
    tokenizer = ChatTokenizer.load(checkpoint)
    seconds, other_programs_s = 0.0, 0.0
    with (
        scratch_folder() as folder,
        noop_engine(cores.engine, checkpoint, turns=True) as engine,
        redis_server(cores.engine, folder) as redis,
        pinned(cores.client),
    ):
        urls = {"SQLite": f"sqlite://{folder}/rollouts.db", "memory": "memory:", "Redis": redis}
        for store in stores:
            url = urls[store]
            if url is None:
                print("the Redis store is skipped: install redis-server to measure it", file=sys.stderr)
                continue
            progress(f"{store}: starting")
            with _bench(cores, engine, folder / store, url) as bench:
                start, before_s = time.monotonic(), bench.other_programs_s()
                measured.rows += bench.rows(store, tokenizer, measured, effort)
                seconds += time.monotonic() - start
                other_programs_s += bench.other_programs_s() - before_s
    measured.others = other_programs_s / seconds
    return measured


@contextmanager
def _bench(cores: Cores, engine: int, files: Path, store: str) -> Iterator["Bench"]:
    """One proxy in front of the engine, or two if processes can share the store."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                proxy(
                    cores.proxy,
                    engine,
                    files.with_suffix(f".{number}.log"),
                    store=store,
                    clocks=files.with_suffix(f".{number}.clocks"),
                )
            )
            for number in range(1 if store == "memory:" else 2)
        ]
        lines = [
            stack.enter_context(closing(Connection(port))) for port in (engine, *(p.port for p in running))
        ]
        clocks = [files.with_suffix(f".{number}.clocks") for number in range(len(running))]
        yield Bench(running, lines[0], lines[1], lines[2] if len(lines) > 2 else None, clocks)


@dataclass(frozen=True, slots=True)
class Bench:
    """The proxies that share a store, and connections to them and to the engine."""

    running: list[Proxy]
    engine: Connection
    here: Connection
    other: Connection | None
    """To another process that shares the store; None for the memory store."""
    clocks: list[Path]

    def other_programs_s(self) -> float:
        """CPU seconds that other processes have used on the proxies' core."""
        return self.running[0].other_programs_s() - sum(process.cpu_s() for process in self.running[1:])

    def rows(self, store: str, tokenizer: ChatTokenizer, measured: Measured, effort: Effort) -> list[Times]:
        """Time turns after conversations of each length.

        Raises:
            BadResponse: see `measure`.
        """
        author = Author(tokenizer)
        states = (SAME, ELSEWHERE, RESTARTED) if self.other else (SAME,)
        rows = {state: Times(store, state) for state in states}
        talks = {}
        for length in effort.lengths:
            progress(f"{store}: a conversation of {length:,} tokens")
            talks[length] = build_conversation(self.here, author, length)
            self._check(talks[length], author, tokenizer)
        for number in range(effort.rounds):
            progress(f"{store}: round {number + 1} of {effort.rounds}")
            for length, conversation in talks.items():
                for turn in range(effort.turns):
                    self._time(self.here, self._next(self.here, conversation, author), rows[SAME], length)
                    if self.other and turn % 4 == 0:
                        elsewhere = self._next(
                            self.here, self._next(self.other, conversation, author), author
                        )
                        self._time(self.other, elsewhere, rows[ELSEWHERE], length)
                measured.render[length] += _renders(
                    tokenizer, self._next(self.here, conversation, author), effort
                )
        for length in effort.lengths if self.other else ():
            for number in range(effort.restarts):
                count = f"{number + 1} of {effort.restarts}"
                progress(f"{store}: restart {count} after {length:,} tokens")
                conversation = build_conversation(self.here, author, length)
                self._time(
                    self.other or self.here,
                    self._next(self.here, conversation, author),
                    rows[RESTARTED],
                    length,
                )
        requests = [spans for file in self.clocks for spans in read_clocks(file)]
        for row in rows.values():
            row.add_stages(requests)
        return list(rows.values())

    def _next(self, connection: Connection, conversation: Conversation, author: Author) -> Conversation:
        """The conversation with one more turn, which a proxy has recorded."""
        return conversation.with_turn(connection.send(conversation.request()), author)

    def _time(self, connection: Connection, conversation: Conversation, times: Times, length: int) -> None:
        request = conversation.request()
        direct, proxied = self.engine.send(request), connection.send(request)
        expect(proxied, "extended")
        times.direct_ms[length].append(direct.ms)
        times.proxy_ms[length].append(proxied.ms)
        times.tokens[length].append(proxied.prompt_tokens)
        times.windows[length].append((proxied.start_ns, proxied.end_ns))

    def _check(self, conversation: Conversation, author: Author, tokenizer: ChatTokenizer) -> None:
        following = self._next(self.here, conversation, author)
        check_exact(self.other or self.here, following, partial(tokenizer.render, tools=TOOLS))


def _renders(tokenizer: ChatTokenizer, conversation: Conversation, effort: Effort) -> list[float]:
    """Milliseconds of rendering a conversation from parsed messages."""
    taken = []
    messages = conversation.parsed()
    for _ in range(effort.renders):
        start = time.perf_counter_ns()
        tokenizer.render(messages, tools=TOOLS)
        taken.append((time.perf_counter_ns() - start) / 1e6)
    return taken


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--store", action="append", choices=STORES, help="only this store; repeatable (default: all)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
