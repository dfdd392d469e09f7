"""The command `tokenproxy export`: a store's samples, once, or with --follow as rollouts are finished."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from tokenproxy.base.errors import UsageError
from tokenproxy.base.files import whole_file
from tokenproxy.record.store import Limits, Store, StoreError
from tokenproxy.samples.export import (
    ExportRefused,
    JsonLines,
    Parquet,
    Report,
    Rows,
    export,
    table,
)
from tokenproxy.samples.feed import FeedFilter, metadata_condition
from tokenproxy.samples.follow import Follower, end_last_line
from tokenproxy.samples.layouts import LAYOUTS
from tokenproxy.samples.samples import Selection
from tokenproxy.settings import load_settings
from tokenproxy.store.sqlite import SqliteStore
from tokenproxy.store.urls import make_store, place

STDOUT = "-"
_QUIET_S = 2.0
"""Seconds before a command shows its progress."""


def run_export(options: argparse.Namespace) -> int:
    """Run the export; returns the exit code.

    Raises:
        UsageError: the flags contradict each other; nothing was written.
    """
    suffix = Path(options.out).suffix
    if options.format is None and suffix not in ("", ".jsonl", ".parquet"):
        raise UsageError(f"no export is a {suffix}: pass --out FILE.jsonl or FILE.parquet, or a --format")
    parquet = options.format == "parquet" or (options.format is None and options.out.endswith(".parquet"))
    if options.follow and parquet:
        raise UsageError("--follow writes JSON lines: pass --out FILE.jsonl, or --format jsonl")
    if options.follow:
        return _follow(options)
    if options.after is not None or options.metadata or options.weight_version:
        raise UsageError("--after, --metadata and --weight-version select finished rollouts: add --follow")
    if options.out == STDOUT and parquet:
        raise UsageError("Parquet cannot be written to stdout: pass --out FILE.parquet, or --format jsonl")
    try:
        store = chosen_store(options)
        with _output(options.out, append=False) as file:
            rows: Rows = Parquet(file, LAYOUTS[options.layout]) if parquet else JsonLines(file)
            report = asyncio.run(_export(store, rows, options))
    except ExportRefused as error:
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except (StoreError, OSError) as error:
        print(f"tokenproxy: {error}", file=sys.stderr)
        return 1
    if not report.rollouts:
        store_url = load_settings(options.config, store=options.store).store
        _say(f"the store is {place(store_url)}: pass --store URL for another")
    to_stdout = options.out == STDOUT
    print(table(report, "stdout" if to_stdout else options.out), file=sys.stderr if to_stdout else sys.stdout)
    return 0


@contextlib.contextmanager
def _output(out: str, *, append: bool) -> Iterator[BinaryIO]:
    """The file to write. Raises UsageError if the name is that of something else."""
    if out == STDOUT:
        yield sys.stdout.buffer
        return
    path = Path(out)
    if path.exists() and not path.is_file():
        raise UsageError(f"{out} is not a regular file: pass another --out FILE, or --out - for stdout")
    if not append:
        with whole_file(path) as file:
            yield file
        return
    path.touch()
    with path.open("r+b") as existing:  # what an earlier run wrote stays
        end_last_line(existing)
        yield existing


def progress_bar(items: Iterable[Any] | None = None, **options: str) -> "tqdm[Any]":
    """The progress of a command, on stderr."""
    # in a log file every refresh is a new line: refresh rarely
    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(items, delay=_QUIET_S, mininterval=every, file=sys.stderr, **options)


async def _export(store: Store, rows: Rows, options: argparse.Namespace) -> Report:
    await store.open()
    try:
        with progress_bar(unit=" rollouts", desc="export") as bar:

            def start(total: int) -> None:
                # not `reset`, which shows the bar at once
                bar.total = total

            return await export(
                store,
                rows,
                LAYOUTS[options.layout],
                only=options.session,
                selection=_selection(options),
                on_start=start,
                on_rollout=bar.update,
            )
    finally:
        await store.aclose()


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(options.shared, frozenset(options.classes), options.on_policy)


def _follow(options: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code.

    Raises:
        UsageError: the flags contradict each other; nothing was written.
    """
    if options.session:
        raise UsageError("--follow has no --session: select finished rollouts with --metadata KEY=VALUE")
    selected = FeedFilter(
        metadata=tuple(_condition(text) for text in options.metadata),
        weight_versions=frozenset(options.weight_version),
        turns=_selection(options),
    )
    store = chosen_store(options)
    follower = Follower(store, LAYOUTS[options.layout], selected, options.after or 0)

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
        with _output(options.out, append=True) as file:
            asyncio.run(run(file))
    except KeyboardInterrupt:
        pass  # the signal came before its handler was set
    except BrokenPipeError:
        _forget_stdout()
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


def _say(message: str) -> None:
    print(f"tokenproxy: {message}", file=sys.stderr, flush=True)


def chosen_store(options: argparse.Namespace) -> Store:
    """The store of the flags or the settings, not yet open. Raises UsageError."""
    try:
        settings = load_settings(options.config, store=options.store)
        limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
        store = make_store(settings.store, limits)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if isinstance(store, SqliteStore) and store.file is None:
        raise UsageError(
            "the store memory: exists only inside the proxy: request /v1/sessions/{session}/samples or "
            "/v1/samples from it, or pass --store URL"
        )
    if isinstance(store, SqliteStore) and store.file and not store.file.exists():
        raise UsageError(f"no store at {store.file}: pass --store URL with the proxy's own setting `store`")
    return store


def _forget_stdout() -> None:
    """Redirect stdout, whose reader closed the pipe as `head` does: Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
