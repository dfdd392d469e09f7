"""The index of a SQLite store: which turns are under which key, and which of them are open.

`entries` is sorted by key, ids, open, turn: the rows of a group are neighbours, first its closed turns, then
its open ones, both from the oldest to the newest. Everything here runs in a transaction of the caller.

One statement handles all entries of a turn: the module `sqlite3` releases the interpreter lock in each step,
and a thread may wait up to 5 ms to get it back.
"""

import heapq
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from proxy.history.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexEntry
from proxy.stores.packed import unpack_entries

T = TypeVar("T", bytes, str)

INDEX_SCHEMA = """
CREATE TABLE entries (
    key BLOB NOT NULL, ids BLOB NOT NULL, open INTEGER NOT NULL, turn TEXT NOT NULL,
    PRIMARY KEY (key, ids, open, turn)
) WITHOUT ROWID;
"""
_KEYS_AT_ONCE = 256
_CANDIDATES = f"""
SELECT turn, rollout, entries.open FROM entries CROSS JOIN turns ON turns.id = turn WHERE key = ? AND ids = ?
ORDER BY entries.open DESC, turn DESC LIMIT {FOUND_AT_MOST}
"""


def in_chunks(keys: Iterable[T]) -> Iterator[list[T]]:
    """The distinct values, in lists short enough for the values of one statement."""
    distinct = list(dict.fromkeys(keys))
    for start in range(0, len(distinct), _KEYS_AT_ONCE):
        yield distinct[start : start + _KEYS_AT_ONCE]


def question_marks(values: Sequence[object]) -> str:
    """As many as there are values, for SQL's `IN (...)`."""
    return ", ".join("?" * len(values))


def put_entries(connection: sqlite3.Connection, turn: str, entries: Iterable[IndexEntry]) -> None:
    """Add an open turn to the index."""
    values = [value for key, ids in entries for value in (key, ids, turn)]
    if values:
        rows = ", ".join(["(?, ?, 1, ?)"] * (len(values) // 3))
        connection.execute(f"INSERT OR IGNORE INTO entries VALUES {rows}", values)


def remove_entries(
    connection: sqlite3.Connection, turn: str, entries: Iterable[IndexEntry], open: bool
) -> None:
    """Remove a turn from the index."""
    where, values = _rows_of(turn, entries, open)
    if values:
        connection.execute(f"DELETE FROM entries WHERE {where}", values)


def _rows_of(turn: str, entries: Iterable[IndexEntry], open: bool) -> tuple[str, list[bytes | bool | str]]:
    """A condition that selects the rows of a turn, and its values."""
    rows = [(key, ids, open, turn) for key, ids in entries]
    where = " OR ".join(["(key = ? AND ids = ? AND open = ? AND turn = ?)"] * len(rows))
    return where, [value for row in rows for value in row]


def find(connection: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Found]:
    """See `Store.find`."""
    groups: dict[bytes, list[tuple[bytes, int, str]]] = {}
    for chunk in in_chunks(keys):
        query = f"""
            SELECT key, ids, count(*), max(turn) FROM entries WHERE key IN ({question_marks(chunk)})
            GROUP BY key, ids
        """
        for key, *group in connection.execute(query, chunk):
            groups.setdefault(key, []).append(tuple(group))
    return {key: _found(connection, key, key_groups) for key, key_groups in groups.items()}


def _found(connection: sqlite3.Connection, key: bytes, groups: Sequence[tuple[bytes, int, str]]) -> Found:
    """What is under a key, from its groups: ids, number of turns, newest turn."""
    newest = heapq.nlargest(FOUND_AT_MOST, groups, key=lambda group: group[2])
    total = sum(count for _, count, _ in groups)
    return Found(
        total, [CandidateGroup(ids, count, _candidates(connection, key, ids)) for ids, count, _ in newest]
    )


def _candidates(connection: sqlite3.Connection, key: bytes, ids: bytes) -> list[Candidate]:
    rows = connection.execute(_CANDIDATES, (key, ids))
    return [Candidate(turn, rollout, bool(open)) for turn, rollout, open in rows]


def claim(connection: sqlite3.Connection, turn: str) -> bool:
    """See `Store.claim`."""
    row = connection.execute("SELECT entries FROM turns WHERE id = ? AND open", (turn,)).fetchone()
    if row is None:
        return False
    connection.execute("UPDATE turns SET open = 0 WHERE id = ?", (turn,))
    _move_entries(connection, turn, row[0], open=False)
    return True


def release(connection: sqlite3.Connection, turn: str) -> None:
    """See `Store.release`."""
    query = "SELECT entries FROM turns WHERE id = ? AND NOT open AND NOT continued"
    row = connection.execute(query, (turn,)).fetchone()
    if row is not None:
        connection.execute("UPDATE turns SET open = 1 WHERE id = ?", (turn,))
        _move_entries(connection, turn, row[0], open=True)


def mark_continued(connection: sqlite3.Connection, turn: str) -> None:
    """Note that a turn was recorded that continues this one: it is never open again."""
    row = connection.execute("SELECT open, entries FROM turns WHERE id = ?", (turn,)).fetchone()
    if row is not None:
        connection.execute("UPDATE turns SET open = 0, continued = 1 WHERE id = ?", (turn,))
        if row[0]:
            _move_entries(connection, turn, row[1], open=False)


def _move_entries(connection: sqlite3.Connection, turn: str, packed_entries: bytes, *, open: bool) -> None:
    """Move a turn's entries to where open turns are, or from there."""
    where, values = _rows_of(turn, unpack_entries(packed_entries), not open)
    if values:
        connection.execute(f"UPDATE entries SET open = ? WHERE {where}", [open, *values])


def flag_ambiguous(
    connection: sqlite3.Connection, rollout: str, entries: Iterable[IndexEntry], own: bool
) -> None:
    """Make sessions ambiguous because of a turn whose entries are about to be put.

    Args:
        rollout: of the turn.
        own: whether the turn makes its own session ambiguous in any case.
    """
    rollouts: set[str] = set()
    keys = list({key for key, ids in entries if ids})
    query = f"SELECT 1 FROM entries WHERE key IN ({question_marks(keys)}) LIMIT 1"
    # usually nothing: a key is seldom used twice
    if keys and connection.execute(query, keys).fetchone():
        rollouts.update(*(_rollouts_to_flag(connection, key) for key in keys))
    rollouts.discard(rollout)
    if rollouts or own:
        rows = [(name,) for name in (rollout, *rollouts)]
        connection.executemany("UPDATE sessions SET ambiguous = 1 WHERE id = ? AND NOT ambiguous", rows)


def _rollouts_to_flag(connection: sqlite3.Connection, key: bytes) -> set[str]:
    """Rollouts that become ambiguous if another rollout adds a turn with ids under this key.

    Returns the rollouts of all turns without ids, and the rollout of one turn with ids. One is enough: if
    turns with ids belong to several rollouts, all of those became ambiguous when the second was added.
    """
    query = "SELECT ids, turn FROM entries WHERE key = ? ORDER BY ids DESC LIMIT 1"
    last = connection.execute(query, (key,)).fetchone()
    if last is None:
        return set()
    query = """
        SELECT DISTINCT rollout FROM entries CROSS JOIN turns ON turns.id = turn WHERE key = ? AND ids = x''
        UNION SELECT rollout FROM turns WHERE id = ?
    """
    return {row[0] for row in connection.execute(query, (key, last[1]))}
