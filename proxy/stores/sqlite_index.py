"""The index of a SQLite store: which turns are under which key, and which of them are open.

`entries` is sorted by key, ids, open, turn: the turns of a group are neighbours, its open ones the last, and
the newest the last among those. Everything here runs in a transaction of the caller.
"""

import heapq
import sqlite3
from collections.abc import Iterable, Sequence

from proxy.history.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexEntry
from proxy.stores.packed import unpack_entries

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


def put_entries(connection: sqlite3.Connection, turn: str, entries: Iterable[IndexEntry]) -> None:
    """Add an open turn to the index."""
    rows = [(key, ids, turn) for key, ids in entries]
    connection.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?, 1, ?)", rows)


def remove_entries(
    connection: sqlite3.Connection, turn: str, entries: Iterable[IndexEntry], open: bool
) -> None:
    """Remove a turn from the index."""
    rows = [(key, ids, open, turn) for key, ids in entries]
    connection.executemany("DELETE FROM entries WHERE key = ? AND ids = ? AND open = ? AND turn = ?", rows)


def find(connection: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Found]:
    """See `Store.find`."""
    groups: dict[bytes, list[tuple[bytes, int, str]]] = {}
    distinct = list(dict.fromkeys(keys))
    for start in range(0, len(distinct), _KEYS_AT_ONCE):
        chunk = distinct[start : start + _KEYS_AT_ONCE]
        query = f"""
            SELECT key, ids, count(*), max(turn) FROM entries WHERE key IN ({",".join("?" * len(chunk))})
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
    rows = [(open, key, ids, not open, turn) for key, ids in unpack_entries(packed_entries)]
    update = "UPDATE entries SET open = ? WHERE key = ? AND ids = ? AND open = ? AND turn = ?"
    connection.executemany(update, rows)


def flag_ambiguous(
    connection: sqlite3.Connection, rollout: str, entries: Iterable[IndexEntry], own: bool
) -> None:
    """Make sessions ambiguous because of a turn whose entries are about to be put.

    Args:
        rollout: of the turn.
        own: whether the turn makes its own session ambiguous in any case.
    """
    rollouts: set[str] = set()
    for key in {key for key, ids in entries if ids}:
        rollouts |= _rollouts_to_flag(connection, key)
    rollouts.discard(rollout)
    if rollouts or own:
        rows = [(name,) for name in (rollout, *rollouts)]
        connection.executemany("UPDATE sessions SET ambiguous = 1 WHERE id = ? AND NOT ambiguous", rows)


def _rollouts_to_flag(connection: sqlite3.Connection, key: bytes) -> set[str]:
    """Rollouts that become ambiguous if another one adds a turn with ids under this key.

    Those of all turns without ids, and that of one turn with ids: if turns with ids belong to several
    rollouts, all of those became ambiguous when the second was added.
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
