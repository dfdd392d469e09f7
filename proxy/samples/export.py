"""Recorded rollouts become a file of training samples.

Memory is bounded by one rollout, some rows on their way to the file, and the ids of the rollouts already
written. A rollout that is used while the export runs is exported as it was when it was read.
"""

import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from proxy.history.evidence import PROBLEMS
from proxy.history.store import Session, Store
from proxy.samples.layouts import Kind, Layout, Row
from proxy.samples.samples import Shared, samples_of

SESSIONS_AT_ONCE = 200
"""How many sessions are asked of the store at a time."""

IDS_AT_ONCE = 2**20
"""A Parquet file gets a new row group when its rows hold so many ids."""


class ParquetMissing(Exception):
    """Parquet was asked for and pyarrow is not installed; the message says how to install it."""


class UnknownSession(Exception):
    """The store holds no session of this name."""


class Rows(Protocol):
    """A file that takes rows."""

    def write(self, row: Row) -> None:
        """Add a row."""
        ...

    def finish(self) -> None:
        """Write what is still held. The file itself stays open."""
        ...


class JsonLines:
    """One JSON object a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        """Add a line."""
        self._file.write(msgspec.json.encode(row) + b"\n")

    def finish(self) -> None:
        """Hand over what is buffered."""
        self._file.flush()


class Parquet:
    """Typed columns; what is nested stands there as JSON text."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        """Begin a file.

        Raises:
            ParquetMissing: pyarrow is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ParquetMissing(
                "Parquet files need pyarrow: pip install 'tokenproxy[parquet]', or use --format jsonl"
            ) from error
        types: dict[Kind, Any] = {
            "ids": pyarrow.list_(pyarrow.int32()),
            "mask": pyarrow.list_(pyarrow.int8()),
            "flags": pyarrow.list_(pyarrow.bool_()),
            "floats": pyarrow.list_(pyarrow.float32()),
            "text": pyarrow.string(),
            "integer": pyarrow.int32(),
            "number": pyarrow.float64(),
            "flag": pyarrow.bool_(),
            "json": pyarrow.string(),
        }
        self._table = pyarrow.Table
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in layout.columns.items()])
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._nested = [name for name, kind in layout.columns.items() if kind == "json"]
        self._ids = [name for name, kind in layout.columns.items() if kind == "ids"]
        self._rows: list[Row] = []
        self._held = 0

    def write(self, row: Row) -> None:
        """Add a row; a row group is written when enough are held."""
        nested = {name: msgspec.json.encode(row[name]).decode() for name in self._nested}
        self._rows.append({**row, **nested})
        self._held += sum(len(row[name]) for name in self._ids)
        if self._held >= IDS_AT_ONCE:
            self._write_group()

    def finish(self) -> None:
        """Write the last group and the file's footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows, self._held = [], 0


@dataclass(slots=True)
class Report:
    """What an export did."""

    rollouts: int = 0
    """Those that hold turns."""
    samples: int = 0
    trained_ids: int = 0
    """Ids with a loss mask of 1."""
    unrewarded: int = 0
    """Samples without a reward."""
    refused: Counter[str] = field(default_factory=Counter)
    """How many leaves, by reason."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block ends well, and not at all if it does not.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


async def export(
    store: Store,
    rows: Rows,
    layout: Layout,
    *,
    only: Sequence[str] = (),
    shared: Shared = "once",
    on_rollout: Callable[[], object] = lambda: None,
) -> Report:
    """Write the samples of a store's rollouts, the last used first.

    Args:
        store: open.
        only: ids of sessions or rollouts; all if empty.
        shared: whether turns that samples share are trained once or in each.
        on_rollout: called behind each rollout.

    Raises:
        UnknownSession: one of `only` is not there; nothing was written.
        StoreError, OSError: reading or writing failed.
    """
    report = Report()
    async for session in _named(store, only) if only else _all(store):
        turns = await store.turns(session.id)
        rewards = await store.rewards(session.id)
        found = samples_of(turns, rewards, session=session, shared=shared)
        for sample in found.samples:
            rows.write(layout.row(sample))
            report.samples += 1
            report.trained_ids += sum(sample.loss_mask)
            report.unrewarded += sample.reward is None
        report.refused.update(refused.reason for refused in found.refused)
        report.rollouts += bool(turns)
        on_rollout()
    rows.finish()
    return report


async def _named(store: Store, only: Sequence[str]) -> AsyncIterator[Session]:
    found = {name: await store.session(name) for name in only}
    missing = [name for name, session in found.items() if session is None]
    if missing:
        raise UnknownSession(f"the store holds no session {', '.join(missing)}")
    for session in found.values():
        if session is not None:
            yield session


async def _all(store: Store) -> AsyncIterator[Session]:
    """Every session once. The second pass finds those that were used during the first and evaded it."""
    done: set[str] = set()
    begun: float | None = None
    for _ in ("all", "moved"):
        async for session in _used_after(store, -math.inf if begun is None else begun):
            begun = session.used if begun is None else begun
            if session.id not in done:
                done.add(session.id)
                yield session


async def _used_after(store: Store, until: float) -> AsyncIterator[Session]:
    """Sessions page by page, the last used first; some may come twice."""
    limit, before = SESSIONS_AT_ONCE, None
    while True:
        page = await store.sessions(limit=limit, before=before)
        for session in page:
            if session.used <= until:
                return
            yield session
        if len(page) < limit:
            return
        # `before` leaves out its own instant: ask for it again, or its sessions on the next page are lost
        before = math.nextafter(page[-1].used, math.inf)
        if page[0].used == page[-1].used:
            limit *= 2


def table(report: Report, out: str) -> str:
    """What an export did, in a few lines for a person."""
    if not report.rollouts:
        return "nothing to export: there are no turns"
    lines = [
        ("rollouts", report.rollouts, ""),
        ("samples", report.samples, f"to {out}; {report.trained_ids} ids to train on"),
    ]
    if report.unrewarded:
        lines.append(("  no reward", report.unrewarded, "set it, or your trainer finds none"))
    lines.append(("refused", report.refused.total(), ""))
    lines += [
        (f"  {reason}", count, PROBLEMS.get(reason, "")) for reason, count in report.refused.most_common()
    ]
    width = max(len(name) for name, _, _ in lines)
    return "\n".join(f"{name:<{width}} {count:>8}  {words}".rstrip() for name, count, words in lines)
