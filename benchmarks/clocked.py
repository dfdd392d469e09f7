"""The proxy with timers in its stages: `python -m benchmarks.clocked FILE serve ...`.

It writes one line to FILE for each chat completion: the start and end of every stage, in nanoseconds of
CLOCK_MONOTONIC. All processes share this clock, so a client finds its own requests by their time.
"""

import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REQUEST = "request"
"""The span of a whole request, except for HTTP parsing and writing on the client's side."""
STAGES = {
    "read fields": "proxy.dialects.chat:ChatDialect.parse",
    "digest messages": "proxy.history.placing:Placer.parse",
    "match": "proxy.history.matcher:Matcher.match",
    "append": "proxy.history.planner:Planner._extend",
    "write request": "proxy.engine.token_in:chat_body",
    "engine, head": "proxy.engine.http:HttpEngine.send",
    "engine, body": "proxy.engine.http:HttpResponse.read",
    "read response": "proxy.turn.serve:_read_body",
    "make turn": "proxy.history.recorder:new_turns",
    "commit": "{store}.add",
    "cache turn": "proxy.history.cache:TurnCache.put",
}
"""The stages of a request in order, each with the function that is timed."""
INSIDE = {
    "match: find": "{store}.find",
    "match: path": "{store}.path",
    "match: join": "proxy.history.matcher:read_turn",
    "parallel: keep response": "proxy.history.retries:Retries.keep",
}
"""Parts of stages, and what runs next to them."""
_STORES = (
    "proxy.stores.memory:MemoryStore",
    "proxy.stores.sqlite:SqliteStore",
    *(("proxy.stores.redis:RedisStore",) if find_spec("redis") else ()),
)

Span = tuple[str, int, int]


class Clocks:
    """Times the stages' functions, and writes the spans of each request when it ends."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._spans: list[Span] = []

    def start(self) -> None:
        """Replace the function of every stage by a timed one.

        Raises:
            AttributeError: a stage's function does not exist (any more).
        """
        for name, target in (STAGES | INSIDE).items():
            for store in _STORES if "{store}" in target else ("",):
                self._replace(target.format(store=store), name)
        self._replace("proxy.routes.turns:TurnRoute.answer", REQUEST)

    def _replace(self, target: str, name: str) -> None:
        module, _, path = target.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, attribute, self._timed(getattr(owner, attribute), name))

    def _timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(work)
        async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return await work(*args, **kwargs)
            finally:
                self._stop(name, start)

        @functools.wraps(work)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return work(*args, **kwargs)
            finally:
                self._stop(name, start)

        return timed_coroutine if inspect.iscoroutinefunction(work) else timed_function

    def _stop(self, name: str, start: int) -> None:
        self._spans.append((name, start, time.perf_counter_ns()))
        if name == REQUEST:
            spans, self._spans = self._spans, []
            os.write(self._file, json.dumps(spans).encode() + b"\n")


def read_clocks(file: Path) -> list[list[Span]]:
    """Read a file of `Clocks`: one list of spans for each request."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [[(name, start, end) for name, start, end in json.loads(line)] for line in lines]


if __name__ == "__main__":
    out, *arguments = sys.argv[1:]
    from proxy.cli import main

    Clocks(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)).start()
    sys.exit(main(arguments))
