"""The tables of a SQLite store, and what changes several of them.

Turns are MessagePack beside the columns that queries need; `totals` holds running sums, so that no write has
to add anything up. What is called here runs in a transaction of the caller.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from proxy.history.store import Evicted, Limits, Session, StoreError
from proxy.stores.packed import goal, implicit_session, unpack_keys

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x746F6B70
_BATCH = 512
"""Turns that leave in one transaction, so that other processes need not wait long for theirs."""
_SCHEMA = f"""
CREATE TABLE turns (
    id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, parent TEXT, size INTEGER NOT NULL,
    keys BLOB NOT NULL, packed BLOB NOT NULL
);
CREATE INDEX turns_of_rollout ON turns (rollout, id);
CREATE TABLE keys (key BLOB NOT NULL, turn TEXT NOT NULL, PRIMARY KEY (key, turn)) WITHOUT ROWID;
CREATE TABLE sessions (
    id TEXT NOT NULL PRIMARY KEY, explicit INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    turns INTEGER NOT NULL, size INTEGER NOT NULL, defaults BLOB NOT NULL, overrides BLOB NOT NULL,
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (used, id);
CREATE TABLE rewards (
    rollout TEXT NOT NULL, turn TEXT NOT NULL, reward REAL, PRIMARY KEY (rollout, turn)
) WITHOUT ROWID;
CREATE TABLE evicted (seq INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE);
CREATE TABLE answers (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key BLOB NOT NULL, since REAL NOT NULL,
    size INTEGER NOT NULL, packed BLOB NOT NULL
);
CREATE INDEX answers_by_key ON answers (key, id);
CREATE TABLE totals (turns INTEGER NOT NULL, size INTEGER NOT NULL, answers INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
PATH = """
WITH RECURSIVE up (id) AS (
    VALUES (?) UNION SELECT turns.parent FROM up JOIN turns USING (id) WHERE turns.parent IS NOT NULL
)
SELECT id, packed FROM up JOIN turns USING (id)
"""
SESSION = "id, explicit, created, used, turns, size, defaults, overrides, metadata"
_SAVE_SESSION = f"""
INSERT INTO sessions ({SESSION}) VALUES (?, ?, ?, ?, 0, 0, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET explicit = excluded.explicit, created = excluded.created,
    used = excluded.used, defaults = excluded.defaults, overrides = excluded.overrides,
    metadata = excluded.metadata
"""


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables where there are none.

    Raises:
        StoreError: the file is another program's, or of another version.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application == _APPLICATION_ID and version == SCHEMA_VERSION:
        return
    if application == _APPLICATION_ID:
        raise StoreError(
            f"{path} has version {version} of the tables, and this program knows {SCHEMA_VERSION}: "
            "move the file away, or name another"
        )
    if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise StoreError(f"{path} is another program's database: name another file")
    # executescript would commit
    for statement in filter(str.strip, _SCHEMA.split(";")):
        connection.execute(statement)


def held(connection: sqlite3.Connection) -> int:
    """Bytes of turns."""
    size: int = connection.execute("SELECT size FROM totals").fetchone()[0]
    return size


def bury_much(connection: sqlite3.Connection, limits: Limits, keep: str | None) -> Evicted:
    """Bury some of the oldest used if more than the goal is held.

    `keep` goes last, and only if the rest was not enough.
    """
    left, turns = held(connection), 0
    chosen: list[str] = []
    cursor = connection.execute("SELECT id, turns, size FROM sessions WHERE turns > 0 ORDER BY used, id")
    for rollout, its_turns, size in cursor:
        if left <= goal(limits) or turns >= _BATCH:
            break
        if rollout != keep:
            chosen.append(rollout)
            turns += its_turns
            left -= size
    cursor.close()
    if not chosen and left > limits.max_bytes:
        query = "SELECT id FROM sessions WHERE id = ? AND turns > 0"
        chosen = [row[0] for row in connection.execute(query, (keep,)).fetchall()]
    return _bury(connection, limits, chosen)


def bury_old(connection: sqlite3.Connection, limits: Limits, oldest: float) -> Evicted:
    """Bury some of those that were used before `oldest`."""
    turns, chosen = 0, []
    cursor = connection.execute("SELECT id, turns FROM sessions WHERE used < ? LIMIT ?", (oldest, _BATCH))
    for rollout, its_turns in cursor:
        if turns >= _BATCH:
            break
        chosen.append(rollout)
        turns += its_turns
    cursor.close()
    return _bury(connection, limits, chosen)


def drop_answers(connection: sqlite3.Connection, limits: Limits, since: float) -> None:
    """Let the oldest answers go: those kept before `since`, and those that are too much."""
    left = connection.execute("SELECT answers FROM totals").fetchone()[0]
    dropped = []
    cursor = connection.execute("SELECT seq, size, since FROM answers ORDER BY seq")
    for seq, size, kept_since in cursor:
        if kept_since >= since and left <= limits.answer_bytes:
            break
        dropped.append((seq, size))
        left -= size
    cursor.close()
    remove_answers(connection, dropped)


def session_of(row: tuple[str, int, float, float, int, int, bytes, bytes, bytes]) -> Session:
    """A row with the columns SESSION."""
    rollout, explicit, created, used, turns, size, defaults, overrides, metadata = row
    return Session(
        id=rollout,
        explicit=bool(explicit),
        created=created,
        used=used,
        turns=turns,
        size=size,
        defaults=defaults,
        overrides=overrides,
        metadata=metadata,
    )


def save_session(connection: sqlite3.Connection, session: Session) -> None:
    """Make or describe a session; its counts stay."""
    row = (session.id, session.explicit, session.created, session.used)
    connection.execute(_SAVE_SESSION, (*row, session.defaults, session.overrides, session.metadata))


def make_session(connection: sqlite3.Connection, rollout: str, now: float) -> None:
    """Make the session of a rollout that has none."""
    if not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (rollout,)).fetchall():
        save_session(connection, implicit_session(rollout, now))


def remove(connection: sqlite3.Connection, rollouts: Iterable[str]) -> tuple[int, int, list[bytes]]:
    """Let rollouts go; returns the number of their turns, their bytes and their keys."""
    turns, size = 0, 0
    keys: list[bytes] = []
    for rollout in rollouts:
        rows = connection.execute("SELECT id, size, keys FROM turns WHERE rollout = ?", (rollout,)).fetchall()
        found = [(key, turn_id) for turn_id, _, packed in rows for key in unpack_keys(packed)]
        connection.executemany("DELETE FROM keys WHERE key = ? AND turn = ?", found)
        connection.execute("DELETE FROM turns WHERE rollout = ?", (rollout,))
        connection.execute("DELETE FROM rewards WHERE rollout = ?", (rollout,))
        connection.execute("DELETE FROM sessions WHERE id = ?", (rollout,))
        turns += len(rows)
        size += sum(row[1] for row in rows)
        keys.extend(key for key, _ in found)
    connection.execute("UPDATE totals SET turns = turns - ?, size = size - ?", (turns, size))
    return turns, size, keys


def remove_answers(connection: sqlite3.Connection, answers: Sequence[tuple[int, int]]) -> None:
    """Let answers go, given by number and size."""
    connection.executemany("DELETE FROM answers WHERE seq = ?", [(seq,) for seq, _ in answers])
    size = sum(size for _, size in answers)
    connection.execute("UPDATE totals SET answers = answers - ?", (size,))


def _bury(connection: sqlite3.Connection, limits: Limits, rollouts: Sequence[str]) -> Evicted:
    if not rollouts:
        return Evicted()
    turns, size, keys = remove(connection, rollouts)
    if keys:
        rows = [(key,) for key in keys]
        connection.executemany("INSERT OR REPLACE INTO evicted (key) VALUES (?)", rows)
        last = connection.execute("SELECT max(seq) FROM evicted").fetchone()[0]
        connection.execute("DELETE FROM evicted WHERE seq <= ?", (last - limits.evicted_keys,))
    return Evicted(len(rollouts), turns, size)
