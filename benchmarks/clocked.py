"""The proxy with clocks on its stages: `python -m benchmarks.clocked FILE serve ...`.

For each chat completion one line goes to FILE: the stages with their beginning and end in nanoseconds of
CLOCK_MONOTONIC, which all processes of a machine share: a client knows its own requests by their time.
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

ANSWER = "answer"
"""All of a request, but for HTTP and JSON towards the client."""
STAGES = {
    "parse request": "proxy.dialects.chat:ChatDialect.parse",
    "parse messages": "proxy.history.placing:Placer.parse",
    "match": "proxy.history.matcher:Matcher.match",
    "pin": "{store}.pin",
    "append": "proxy.history.planner:Planner._extend",
    "write request": "proxy.engine.token_in:chat_body",
    "engine, head": "proxy.engine.http:HttpEngine.send",
    "engine, body": "proxy.engine.http:HttpResponse.read",
    "read completion": "proxy.turn.serve:read_completion",
    "redact": "proxy.turn.serve:redact_completion",
    "make turn": "proxy.history.recorder:new_turns",
    "commit": "{store}.add",
    "cache": "proxy.history.cache:TurnCache.put",
}
"""One after the other, each with the function that is timed."""
INSIDE = {
    "match: find": "{store}.find",
    "match: path": "{store}.path",
    "match: join": "proxy.history.matcher:read_turn",
}
"""Parts of stages."""
_STORES = (
    "proxy.stores.memory:MemoryStore",
    "proxy.stores.sqlite:SqliteStore",
    *(("proxy.stores.redis:RedisStore",) if find_spec("redis") else ()),
)

Span = tuple[str, int, int]


class Clocks:
    """Times functions, and writes down what was timed whenever an answer is complete."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._spans: list[Span] = []

    def start(self) -> None:
        """Put a clock on every stage.

        Raises:
            AttributeError: a stage has no such function any more.
        """
        for name, target in (STAGES | INSIDE).items():
            for store in _STORES if "{store}" in target else ("",):
                self._put(target.format(store=store), name)
        self._put("proxy.routes.turns:TurnRoute.answer", ANSWER)

    def _put(self, target: str, name: str) -> None:
        module, _, path = target.partition(":")
        *owners, attribute = path.split(".")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, attribute, self._timed(getattr(owner, attribute), name))

    def _timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(work)
        async def waited(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return await work(*args, **kwargs)
            finally:
                self._stop(name, start)

        @functools.wraps(work)
        def called(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return work(*args, **kwargs)
            finally:
                self._stop(name, start)

        return waited if inspect.iscoroutinefunction(work) else called

    def _stop(self, name: str, start: int) -> None:
        self._spans.append((name, start, time.perf_counter_ns()))
        if name == ANSWER:
            spans, self._spans = self._spans, []
            os.write(self._file, json.dumps(spans).encode() + b"\n")


def read_clocks(file: Path) -> list[list[Span]]:
    """What was written, one list for each request."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [[(name, start, end) for name, start, end in json.loads(line)] for line in lines]


if __name__ == "__main__":
    out, *arguments = sys.argv[1:]
    from proxy.cli import main

    Clocks(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)).start()
    sys.exit(main(arguments))
