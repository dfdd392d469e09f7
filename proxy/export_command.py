"""The command `tokenproxy export`: choose a store, write its samples to a file or stdout, print a table."""

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
    NameNotUnique,
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
"""Seconds before an export shows its progress."""


class UsageError(Exception):
    """The flags contradict each other; the message names them and what to do instead."""


def run_export(options: argparse.Namespace) -> int:
    """Run the export; returns the exit code.

    Raises:
        UsageError: the flags contradict each other; nothing was written.
    """
    parquet = options.format == "parquet" or (options.format is None and options.out.endswith(".parquet"))
    if options.out == STDOUT and parquet:
        raise UsageError("Parquet cannot be written to stdout: pass --out FILE.parquet, or --format jsonl")
    try:
        store = _store(options)
        with _output(options.out) as file:
            rows: Rows = Parquet(file, LAYOUTS[options.layout]) if parquet else JsonLines(file)
            report = asyncio.run(_export(store, rows, options))
    except (ParquetMissing, UnknownSession, NameNotUnique) as error:
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python flushes stdout at exit: redirect it to /dev/null.
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
            "the store memory: exists only inside the proxy: request /v1/sessions/{session}/samples from it, "
            "or pass --store URL"
        )
    if isinstance(store, SqliteStore) and not store.file.exists():
        raise UsageError(f"no store at {store.file}: pass --store URL with the proxy's own setting `store`")
    return store


@contextlib.contextmanager
def _output(out: str) -> Iterator[BinaryIO]:
    if out == STDOUT:
        yield sys.stdout.buffer
        return
    path = Path(out)
    if path.exists() and not path.is_file():
        raise UsageError(f"{out} is not a regular file: pass another --out FILE, or --out - for stdout")
    with whole_file(path) as file:
        yield file


async def _export(store: Store, rows: Rows, options: argparse.Namespace) -> Report:
    await store.open()
    try:
        total = len(set(options.session)) or (await store.usage()).rollouts
        # In a log file every refresh is a new line: refresh rarely.
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
