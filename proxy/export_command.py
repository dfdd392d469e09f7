"""What `tokenproxy export` does."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from proxy.history.store import Limits, Store, StoreError
from proxy.samples.export import (
    JsonLines,
    Parquet,
    ParquetMissing,
    Report,
    Rows,
    UnknownSession,
    export,
    table,
    whole_file,
)
from proxy.samples.layouts import LAYOUTS
from proxy.settings import SettingsError, load_settings
from proxy.stores.memory import MemoryStore
from proxy.stores.sqlite import SqliteStore
from proxy.stores.urls import make_store

STDOUT = "-"
_QUIET_S = 2.0
"""An export that takes no longer shows no progress."""


class UsageError(Exception):
    """The command was used wrongly; the message says how."""


def run_export(options: argparse.Namespace) -> int:
    """Export as the flags say; returns the exit code.

    Raises:
        UsageError: nothing was written, because of what was asked for.
    """
    parquet = options.format == "parquet" or (options.format is None and options.out.endswith(".parquet"))
    if options.out == STDOUT and parquet:
        raise UsageError("a Parquet file cannot go to stdout: give --out FILE.parquet, or --format jsonl")
    try:
        store = _store(options)
        with _output(options.out) as file:
            rows: Rows = Parquet(file, LAYOUTS[options.layout]) if parquet else JsonLines(file)
            report = asyncio.run(_export(store, rows, options))
    except (ParquetMissing, UnknownSession) as error:
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        # The reader has seen enough, as `head` has; what Python would flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StoreError, OSError) as error:
        print(f"tokenproxy: {error}", file=sys.stderr)
        return 1
    to_stdout = options.out == STDOUT
    print(table(report, "stdout" if to_stdout else options.out), file=sys.stderr if to_stdout else sys.stdout)
    return 0


def _store(options: argparse.Namespace) -> Store:
    try:
        settings = load_settings(options.config, store=options.store)
        limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
        store = make_store(settings.store, limits)
    except (SettingsError, ValueError) as error:
        raise UsageError(str(error)) from error
    if isinstance(store, MemoryStore):
        raise UsageError(
            "only the proxy that fills it can read the store memory: - ask it for "
            "/v1/sessions/{session}/samples, or give --store URL"
        )
    if isinstance(store, SqliteStore) and not store.file.exists():
        raise UsageError(f"there is no store at {store.file}: give --store URL, as the proxy was given it")
    return store


@contextlib.contextmanager
def _output(out: str) -> Iterator[BinaryIO]:
    if out == STDOUT:
        yield sys.stdout.buffer
        return
    path = Path(out)
    if path.exists() and not path.is_file():
        raise UsageError(f"{out} is not a regular file; for stdout give --out -")
    with whole_file(path) as file:
        yield file


async def _export(store: Store, rows: Rows, options: argparse.Namespace) -> Report:
    await store.open()
    try:
        total = len(options.session) or (await store.usage()).rollouts
        # Where stderr is a log, each report is a line of its own.
        every = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=total, unit=" rollouts", desc="export", delay=_QUIET_S, mininterval=every, file=sys.stderr
        ) as bar:
            return await export(
                store,
                rows,
                LAYOUTS[options.layout],
                only=options.session,
                shared=options.shared,
                on_rollout=bar.update,
            )
    finally:
        await store.aclose()
