"""Exports recorded rollouts to a file of training samples.

Memory is limited to one rollout, the rows of one Parquet row group, and the ids of all rollouts. The rollouts
are listed when the export starts; each is exported in its state when it is read.
"""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from tokenproxy.record.store import Session, Store
from tokenproxy.record.vocabulary import Problem
from tokenproxy.samples.layouts import Kind, Layout, Row
from tokenproxy.samples.samples import EVERYTHING, Refused, Sample, Selection, samples_of

SESSIONS_AT_ONCE = 200
"""Number of sessions that are read from the store at a time."""

IDS_AT_ONCE = 2**20
"""Number of ids and of characters of nested JSON after which a Parquet row group is written."""

_MEANINGS = {str(problem): problem.meaning for problem in Problem}


class ExportRefused(Exception):
    """The export cannot be made as requested; the message says what to change.

    A requested session is unknown or has the name of another tenant's, or Parquet needs pyarrow.
    """


class JsonLines:
    """One JSON object a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        """Add a line."""
        self._file.write(msgspec.json.encode(row) + b"\n")

    def finish(self) -> None:
        """Flush the file."""
        self._file.flush()


class Parquet:
    """Typed columns; nested values are JSON text."""

    def __init__(self, file: BinaryIO, layout: Layout) -> None:
        """Prepare a file with the layout's columns.

        Raises:
            ExportRefused: pyarrow is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ExportRefused(
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
        fields = [(name, types[column.kind]) for name, column in layout.columns.items()]
        self._schema = pyarrow.schema(fields)
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._nested, self._ids = layout.named("json"), layout.named("ids")
        self._rows: list[Row] = []
        self._held = 0

    def write(self, row: Row) -> None:
        """Add a row; write a row group once its rows hold IDS_AT_ONCE ids and characters of JSON."""
        nested = {name: msgspec.json.encode(row[name]).decode() for name in self._nested}
        self._rows.append({**row, **nested})
        self._held += sum(len(row[name]) for name in self._ids) + sum(map(len, nested.values()))
        if self._held >= IDS_AT_ONCE:
            self._write_group()

    def finish(self) -> None:
        """Write the last row group and the file's footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows, self._held = [], 0


Rows = JsonLines | Parquet
"""Writes rows to a file."""


@dataclass(slots=True)
class Report:
    """Counts of one export."""

    rollouts: int = 0
    """Rollouts that hold turns."""
    samples: int = 0
    trained_ids: int = 0
    """Ids with a loss mask of 1."""
    unrewarded: int = 0
    """Samples without a reward."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of leaves that gave no sample, by `Problem`."""
    logprobs_without: Counter[str] = field(default_factory=Counter)
    """Number of samples with the same `logprobs_without` of trained turns, by these words."""

    def add(self, samples: Sequence[Sample], refused: Sequence[Refused]) -> None:
        """Count the samples of a rollout that holds turns, and its refused leaves."""
        self.rollouts += 1
        self.samples += len(samples)
        self.trained_ids += sum(sum(sample.loss_mask) for sample in samples)
        self.unrewarded += sum(sample.reward is None for sample in samples)
        for sample in samples:
            without = {name: 0 for turn in sample.turns if turn.trained for name in turn.logprobs_without}
            self.logprobs_without.update([", ".join(without)] if without else ())
        self.refused.update(leaf.reason for leaf in refused)


async def export(
    store: Store,
    rows: Rows,
    layout: Layout,
    *,
    only: Sequence[str] = (),
    selection: Selection = EVERYTHING,
    on_start: Callable[[int], object] = lambda total: None,
    on_rollout: Callable[[], object] = lambda: None,
) -> Report:
    """Write the samples of a store's rollouts, the most recently used first.

    Args:
        store: open.
        only: ids or names of sessions, exported in this order; all sessions if empty. A name finds the
            session of any tenant, unless it is also an id.
        selection: what of each rollout is trained on.
        on_start: called with the number of rollouts.
        on_rollout: called after each rollout.

    Raises:
        ExportRefused: `only` does not name existing sessions uniquely; nothing was written.
        StoreError, OSError: reading or writing failed.
    """
    report = Report()
    rollouts = await chosen_rollouts(store, only) if only else [each.id async for each in _listed(store)]
    on_start(len(rollouts))
    for rollout in rollouts:
        session = await store.session(rollout)
        turns = await store.turns(rollout) if session else []  # deleted since the export began
        rewards = session.rewards if session else {}
        found = samples_of(turns, rewards, session=session, selection=selection)
        for sample in found.samples:
            rows.write(layout.row(sample))
        if turns:
            report.add(found.samples, found.refused)
        on_rollout()
    rows.finish()
    return report


async def chosen_rollouts(store: Store, only: Sequence[str]) -> list[str]:
    """The ids of sessions that are given by id or name, in this order. Raises ExportRefused."""
    ids = {word: [word] if await store.session(word) else [] for word in only}
    names = {word for word, found in ids.items() if not found}
    if names:
        async for session in _listed(store):
            if session.name in names:
                ids[session.name].append(session.id)
    if unknown := [word for word, found in ids.items() if not found]:
        raise ExportRefused(f"unknown session {', '.join(unknown)}: never used, deleted, or evicted")
    if shared := [f"{word}: {', '.join(sorted(found))}" for word, found in ids.items() if len(found) > 1]:
        raise ExportRefused(f"several tenants have a session of this name, pass an id - {'; '.join(shared)}")
    return list(dict.fromkeys(found[0] for found in ids.values()))


async def _listed(store: Store) -> AsyncIterator[Session]:
    """Yield each session once, the most recently used first."""
    listed: set[str] = set()
    since = -math.inf
    for _ in range(2):  # a session used between two pages moves to the front: read as much of it again
        before = math.inf
        newest: float | None = None
        while page := await store.sessions(limit=SESSIONS_AT_ONCE, before=before):
            newest = page[0].used if newest is None else newest
            for session in page:
                if session.used >= since and session.id not in listed:
                    listed.add(session.id)
                    yield session
            if page[-1].used < since:
                break
            before = page[-1].used
        since = math.inf if newest is None else newest


def table(report: Report, out: str) -> str:
    """The report as a few lines of text. `out` names the file."""
    if not report.rollouts:
        return "nothing to export: there are no turns"
    lines = [
        ("rollouts", report.rollouts, ""),
        ("samples", report.samples, f"to {out}; {report.trained_ids} ids to train on"),
    ]
    if report.unrewarded:
        lines.append(("  no reward", report.unrewarded, "these samples have no reward"))
    lines += [
        (
            "  logprobs",
            count,
            f"without {names}, or maybe: start vLLM with --logprobs-mode processed_logprobs",
        )
        for names, count in report.logprobs_without.most_common()
    ]
    lines.append(("refused", report.refused.total(), ""))
    lines += [
        (f"  {reason}", count, _MEANINGS.get(reason, "")) for reason, count in report.refused.most_common()
    ]
    width = max(len(name) for name, _, _ in lines)
    return "\n".join(f"{name:<{width}} {count:>8}  {words}".rstrip() for name, count, words in lines)
