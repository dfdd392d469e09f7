"""The command `tokenproxy export --follow`: write finished rollouts until a signal, then print the cursor."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import BinaryIO

from proxy.errors import UsageError
from proxy.export_options import STDOUT, chosen_store, forget_stdout, regular_file
from proxy.history.store import StoreError
from proxy.samples.export import table
from proxy.samples.feed import FeedFilter, metadata_condition
from proxy.samples.follow import Follower, end_last_line
from proxy.samples.layouts import LAYOUTS


def run_follow(options: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code.

    Raises:
        UsageError: the flags contradict each other; nothing was written.
    """
    if options.format == "parquet" or (options.format is None and options.out.endswith(".parquet")):
        raise UsageError("--follow writes JSON lines: pass --out FILE.jsonl, or --format jsonl")
    if options.session:
        raise UsageError("--follow has no --session: select finished rollouts with --metadata KEY=VALUE")
    selected = FeedFilter(
        metadata=tuple(_condition(text) for text in options.metadata),
        weight_versions=frozenset(options.weight_version),
        classes=frozenset(options.classes),
    )
    store = chosen_store(options)
    follower = Follower(store, LAYOUTS[options.layout], selected, options.shared, options.after or 0)

    async def run(file: BinaryIO) -> None:
        await store.open()
        try:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, follower.stop)
            await follower.run(file, lambda error: _say(f"{error}; trying again"))
        finally:
            await store.aclose()

    code = 0
    try:
        with _appended(options.out) as file:
            asyncio.run(run(file))
    except KeyboardInterrupt:
        pass  # the signal came before its handler was set
    except BrokenPipeError:
        forget_stdout()
        code = 1
    except (StoreError, OSError) as error:
        _say(str(error))
        code = 1
    print(table(follower.report, "stdout" if options.out == STDOUT else options.out), file=sys.stderr)
    _say(f"continue with --after {follower.position}")
    return code


def _condition(text: str) -> str:
    try:
        return metadata_condition(text)
    except ValueError as error:
        raise UsageError(f"--metadata must be KEY=VALUE, not {text!r}") from error


@contextlib.contextmanager
def _appended(out: str) -> Iterator[BinaryIO]:
    """The file, at its end: what an earlier run wrote stays."""
    if out == STDOUT:
        yield sys.stdout.buffer
        return
    path = regular_file(out)
    path.touch()
    with path.open("r+b") as file:
        end_last_line(file)
        yield file


def _say(message: str) -> None:
    print(f"tokenproxy: {message}", file=sys.stderr, flush=True)
