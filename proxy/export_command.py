"""The command `tokenproxy export`: choose a store, write its samples to a file or stdout, print a table."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import BinaryIO

from tqdm import tqdm

from proxy.errors import UsageError
from proxy.export_options import STDOUT, chosen_store, forget_stdout, regular_file
from proxy.follow_command import run_follow
from proxy.history.store import Store, StoreError
from proxy.samples.export import (
    ExportRefused,
    JsonLines,
    Parquet,
    Report,
    Rows,
    export,
    table,
    whole_file,
)
from proxy.samples.layouts import LAYOUTS

_QUIET_S = 2.0
"""Seconds before an export shows its progress."""


def run_export(options: argparse.Namespace) -> int:
    """Run the export; returns the exit code.

    Raises:
        UsageError: the flags contradict each other; nothing was written.
    """
    if options.follow:
        return run_follow(options)
    if options.after is not None or options.metadata or options.weight_version:
        raise UsageError("--after, --metadata and --weight-version select finished rollouts: add --follow")
    parquet = options.format == "parquet" or (options.format is None and options.out.endswith(".parquet"))
    if options.out == STDOUT and parquet:
        raise UsageError("Parquet cannot be written to stdout: pass --out FILE.parquet, or --format jsonl")
    try:
        store = chosen_store(options)
        with _output(options.out) as file:
            rows: Rows = Parquet(file, LAYOUTS[options.layout]) if parquet else JsonLines(file)
            report = asyncio.run(_export(store, rows, options))
    except ExportRefused as error:
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        forget_stdout()
        return 1
    except (StoreError, OSError) as error:
        print(f"tokenproxy: {error}", file=sys.stderr)
        return 1
    to_stdout = options.out == STDOUT
    print(table(report, "stdout" if to_stdout else options.out), file=sys.stderr if to_stdout else sys.stdout)
    return 0


@contextlib.contextmanager
def _output(out: str) -> Iterator[BinaryIO]:
    if out == STDOUT:
        yield sys.stdout.buffer
        return
    with whole_file(regular_file(out)) as file:
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
                wanted=frozenset(options.classes),
                on_rollout=bar.update,
            )
    finally:
        await store.aclose()
