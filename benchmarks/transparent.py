"""What does it cost to keep plain OpenAI conversations exact? The command; `--help` says how."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    # of a program run by its path, Python puts the folder on the search path: this package is one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.author import TOOLS, Author
from benchmarks.clocked import read_clocks
from benchmarks.load import BadAnswer
from benchmarks.processes import Cores, Proxy, StartError, noop_engine, pinned, proxy, redis_server
from benchmarks.report import (
    ELSEWHERE,
    QUIET,
    RESTARTED,
    SAME,
    Measured,
    Times,
    machine,
    turns_json,
    turns_text,
)
from benchmarks.talk import Line, Talk, check_exact, expect, grown
from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.errors import DemoError
from tokenization import ChatTokenizer, TokenizationError

_DESCRIPTION = """\
Measure what `POST /v1/chat/completions` of the proxy adds to a turn of a conversation: it is recognised, its
recorded ids are sent with the new ones behind them, and what is sampled is recorded.

The conversation is an agent's: a question, then turns of some 200 sampled tokens with a tool call, each
followed by a result of 400 tokens, until the prompt has about 1k, 32k and 128k tokens. The client is plain
OpenAI: it sends all messages each time, and asks for no ids. The engine does nothing: it sends back the ids
that it was given and a canned turn with ids and log-probabilities, as vLLM does. Engine and client share a
core, the proxy has another. Each timed request is sent to the engine itself and to the proxy:

  added         median through the proxy minus direct median. Direct, the engine is sent messages and renders
                nothing. Proxied, it is also sent ids and sends them back: that is part of what is added.
  render        what the engine would do instead on messages: template and encoding of the whole conversation.
  SQLite, ...   where the proxy records. Redis is measured where a redis-server is installed.
  other process the turn before was recorded by another process that shares the store; this one had the one
                before that.
  restarted     nothing of the conversation is known to the process: everything comes from the store.

Every turn continues one that was recorded a moment ago, and no two are equal. Once for each store and
length it is checked that the prompt has the ids of a rendering. The other tables say what the stages take, by
clocks inside the proxy; `the rest` is HTTP, hand-overs between threads, and the client.

The aim: what is added after 128k tokens is at most three times what is added after 1k. A missed aim does not
change the exit code: machines differ.

Run it where nothing else runs. Linux only: it pins processes to cores and reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/transparent.py                  everything: about three minutes
  python benchmarks/transparent.py --store SQLite   one store
  python benchmarks/transparent.py --quick          does it run: half a minute, and numbers that mean little
  python benchmarks/transparent.py --json out.json  every sample by itself, for another program
"""

STORES = ("SQLite", "memory", "Redis")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure, of each length and store."""

    lengths: tuple[int, ...]
    rounds: int
    turns: int
    """In a round, from a process that knows the conversation; a quarter as many from another one."""
    restarts: int
    """In all."""
    renders: int
    """In a round."""


FULL = Effort(lengths=(1_000, 32_000, 128_000), rounds=5, turns=20, restarts=5, renders=2)
QUICK = Effort(lengths=(1_000, 4_000), rounds=1, turns=4, restarts=1, renders=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return _fail("Linux only: it pins processes to cores and reads /proc")
    try:
        folder = ensure_checkpoint()
        measured = measure(folder, options.store or STORES, QUICK if options.quick else FULL)
    except (DemoError, TokenizationError, StartError, BadAnswer) as error:
        return _fail(str(error))
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("uvicorn", "aiohttp", "msgspec", "tokenizers")
    )
    about = {**machine(), "libraries": libraries, "others": f"{measured.others:.0%}"}
    print(turns_text(measured, about))
    if measured.others > QUIET:
        print(
            f"\nOther programs had {measured.others:.0%} of the proxy's core: measure again when they rest."
        )
    if options.json is not None:
        options.json.write_text(json.dumps(turns_json(measured, about), indent=1) + "\n")
    return 0


def measure(checkpoint: Path, stores: Sequence[str], effort: Effort) -> Measured:
    """Hold the conversations with each store, and time the turns behind them.

    Raises:
        StartError: a process does not come up.
        BadAnswer: the proxy does not keep a conversation, or its ids are wrong.
    """
    measured = Measured(list(effort.lengths))
    cores = Cores.pick()
    tokenizer = ChatTokenizer.load(checkpoint)
    seconds, others_s = 0.0, 0.0
    with (
        tempfile.TemporaryDirectory(prefix="tokenproxy-bench-") as scratch,
        noop_engine(cores.engine, checkpoint, turns=True) as engine,
        redis_server(cores.engine, Path(scratch)) as redis,
        pinned(cores.client),
    ):
        urls = {"SQLite": f"sqlite://{scratch}/rollouts.db", "memory": "memory:", "Redis": redis}
        for store in stores:
            url = urls[store]
            if url is None:
                print("no redis-server here: the Redis store is left out", file=sys.stderr)
                continue
            print(f"{store}: starting ...", file=sys.stderr)
            with _bench(cores, engine, Path(scratch) / store, url) as bench:
                start, before_s = time.monotonic(), bench.others_s()
                measured.rows += bench.rows(store, tokenizer, measured, effort)
                seconds += time.monotonic() - start
                others_s += bench.others_s() - before_s
    measured.others = others_s / seconds
    return measured


@contextmanager
def _bench(cores: Cores, engine: int, files: Path, store: str) -> Iterator["Bench"]:
    """One proxy before the engine, or two where processes can share the store."""
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
        lines = [stack.enter_context(closing(Line(port))) for port in (engine, *(p.port for p in running))]
        clocks = [files.with_suffix(f".{number}.clocks") for number in range(len(running))]
        yield Bench(running, lines[0], lines[1], lines[2] if len(lines) > 2 else None, clocks)


@dataclass(frozen=True, slots=True)
class Bench:
    """The proxies before an engine that share a store, and lines to all of them."""

    running: list[Proxy]
    engine: Line
    here: Line
    other: Line | None
    """To another process that shares the store; None for a store of one process."""
    clocks: list[Path]

    def others_s(self) -> float:
        """Seconds that the proxies' core has run anything else."""
        return self.running[0].others_s() - sum(beside.cpu_s() for beside in self.running[1:])

    def rows(self, store: str, tokenizer: ChatTokenizer, measured: Measured, effort: Effort) -> list[Times]:
        """Time turns after conversations of each length.

        Raises:
            BadAnswer: see `measure`.
        """
        author = Author(tokenizer)
        states = (SAME, ELSEWHERE, RESTARTED) if self.other else (SAME,)
        rows = {state: Times(store, state) for state in states}
        talks = {}
        for length in effort.lengths:
            print(f"{store}: a conversation of {length:,} tokens ...", file=sys.stderr)
            talks[length] = grown(self.here, author, length)
            self._check(talks[length], author, tokenizer)
        for number in range(effort.rounds):
            print(f"{store}: round {number + 1} of {effort.rounds} ...", file=sys.stderr)
            for length, talk in talks.items():
                for turn in range(effort.turns):
                    self._time(self.here, self._next(self.here, talk, author), rows[SAME], length)
                    if self.other and turn % 4 == 0:
                        elsewhere = self._next(self.here, self._next(self.other, talk, author), author)
                        self._time(self.other, elsewhere, rows[ELSEWHERE], length)
                measured.render[length] += _renders(tokenizer, self._next(self.here, talk, author), effort)
        for length in effort.lengths if self.other else ():
            for number in range(effort.restarts):
                count = f"{number + 1} of {effort.restarts}"
                print(f"{store}: restart {count} after {length:,} tokens ...", file=sys.stderr)
                talk = grown(self.here, author, length)
                self._time(
                    self.other or self.here, self._next(self.here, talk, author), rows[RESTARTED], length
                )
        requests = [spans for file in self.clocks for spans in read_clocks(file)]
        for row in rows.values():
            row.add_stages(requests)
        return list(rows.values())

    def _next(self, line: Line, talk: Talk, author: Author) -> Talk:
        """A conversation with one more turn, which a proxy has recorded."""
        return talk.and_then(line.ask(talk.request()), author)

    def _time(self, line: Line, talk: Talk, times: Times, length: int) -> None:
        request = talk.request()
        direct, proxied = self.engine.ask(request), line.ask(request)
        expect(proxied, "extended")
        times.direct_ms[length].append(direct.ms)
        times.proxy_ms[length].append(proxied.ms)
        times.tokens[length].append(proxied.prompt_tokens)
        times.windows[length].append((proxied.start_ns, proxied.end_ns))

    def _check(self, talk: Talk, author: Author, tokenizer: ChatTokenizer) -> None:
        following = self._next(self.here, talk, author)
        check_exact(self.other or self.here, following, partial(tokenizer.render, tools=TOOLS))


def _renders(tokenizer: ChatTokenizer, talk: Talk, effort: Effort) -> list[float]:
    """Milliseconds of rendering a conversation, its messages parsed already."""
    taken = []
    messages = talk.parsed()
    for _ in range(effort.renders):
        start = time.perf_counter_ns()
        tokenizer.render(messages, tools=TOOLS)
        taken.append((time.perf_counter_ns() - start) / 1e6)
    return taken


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=kind)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument(
        "--store", action="append", choices=STORES, help="only this store; repeatable (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    return parser


def _fail(message: str) -> int:
    print(f"transparent.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
