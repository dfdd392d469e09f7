"""The tables of a SQLite store, and what changes several of them.

Turns are MessagePack next to the columns that queries need; `totals` holds running sums, so that no write has
to add anything up. Everything here runs in a transaction of the caller.
"""

import dataclasses
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from proxy.history.store import Evicted, IndexEntry, Limits, Session, StoreUnusable
from proxy.stores.eviction import STEP, AgeClock, ClockRecord, eviction_target
from proxy.stores.packed import description_size, unpack_entries
from proxy.stores.sqlite_documents import DOCUMENT_TABLES
from proxy.stores.sqlite_feed import FEED_TABLES, undelivered
from proxy.stores.sqlite_index import (
    INDEX_SCHEMA,
    flag_ambiguous,
    in_chunks,
    mark_continued,
    put_entries,
    remove_entries,
)
from proxy.stores.turn_files import FILES_SCHEMA, TurnFiles

SCHEMA_VERSION = 3
_APPLICATION_ID = 0x746F6B70
_SCHEMA = f"""
CREATE TABLE turns (
    id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, parent TEXT, open INTEGER NOT NULL,
    continued INTEGER NOT NULL, entries BLOB NOT NULL, file TEXT, packed BLOB NOT NULL
);
CREATE INDEX turns_of_rollout ON turns (rollout, id);
{INDEX_SCHEMA}{FILES_SCHEMA}
CREATE TABLE sessions (
    id TEXT NOT NULL PRIMARY KEY, tenant TEXT NOT NULL, explicit INTEGER NOT NULL, ambiguous INTEGER NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, pinned_until REAL NOT NULL, turns INTEGER NOT NULL,
    size INTEGER NOT NULL, description_size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (used, id);
CREATE INDEX sessions_of_tenant_by_use ON sessions (tenant, used, id);
CREATE TABLE descriptions (
    id TEXT NOT NULL UNIQUE, defaults BLOB NOT NULL, overrides BLOB NOT NULL, metadata BLOB NOT NULL
);
CREATE TABLE rewards (
    rollout TEXT NOT NULL, turn TEXT NOT NULL, reward REAL, PRIMARY KEY (rollout, turn)
) WITHOUT ROWID;
CREATE TABLE evicted (seq INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE);
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key BLOB NOT NULL, kept REAL NOT NULL,
    size INTEGER NOT NULL, packed BLOB NOT NULL
);
CREATE INDEX responses_by_key ON responses (key, id);
CREATE TABLE totals (turns INTEGER NOT NULL, size INTEGER NOT NULL, response_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
# not in the schema: files of this version may lack them
_LATER_TABLES = (
    "CREATE TABLE IF NOT EXISTS clock (seen REAL NOT NULL, steady_since REAL NOT NULL)",
    """CREATE TABLE IF NOT EXISTS replica_changes (
        fleet TEXT NOT NULL, url TEXT NOT NULL, change TEXT NOT NULL, PRIMARY KEY (fleet, url)
    ) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS secret (only INTEGER PRIMARY KEY CHECK (only = 0), value BLOB NOT NULL)",
    *FEED_TABLES,
    *DOCUMENT_TABLES,
)
USED_NOW = """
used = CASE
    WHEN used >= (SELECT max(used) FROM sessions) THEN max(used, :now)
    ELSE max(:now, (SELECT max(used) FROM sessions) + 0.000001)
END
"""
"""Assignment that marks sessions as used now: the last of all, even if the clock was set back."""
PATH = """
WITH RECURSIVE up (id) AS (
    VALUES (?) UNION SELECT turns.parent FROM up JOIN turns USING (id) WHERE turns.parent IS NOT NULL
)
SELECT packed, file FROM up JOIN turns USING (id)
"""
_SAVE_SESSION = """
INSERT INTO sessions VALUES (:id, :tenant, :explicit, 0, :created, :used, 0, 0, :size, :size)
ON CONFLICT (id) DO UPDATE SET tenant = :tenant, explicit = :explicit, created = :created, used = :used,
    size = size - description_size + :size, description_size = :size
"""
_ADD_TO_SESSION = f"""
INSERT INTO sessions VALUES (
    :id, :tenant, :explicit, 0, :created,
    max(:now, coalesce((SELECT max(used) FROM sessions) + 0.000001, 0)), 0, :turns, :size, 0
)
ON CONFLICT (id) DO UPDATE SET {USED_NOW}, turns = turns + :turns, size = size + :size
"""
"""Count new turns of a session, which is created if there is none."""
_NO_DESCRIPTION = (b"{}", b"{}", b"{}")


class TurnRow(NamedTuple):
    """A turn, ready to be inserted."""

    id: str
    parent: str | None
    entries: Sequence[IndexEntry]
    packed_entries: bytes
    packed: bytes
    ambiguous: bool
    """Whether it makes its session ambiguous by itself."""


def prepare(connection: sqlite3.Connection, path: Path | None, files: TurnFiles) -> None:
    """Make the tables where there are none, and delete the files that killed processes left.

    Raises:
        StoreUnusable: the file belongs to another program, or has another version.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application == _APPLICATION_ID and version == SCHEMA_VERSION:
        _create_later_tables(connection)
        files.delete_unused(connection)
        return
    if application == _APPLICATION_ID:
        raise StoreUnusable(
            f"{path} has version {version} of the tables, and this program needs version {SCHEMA_VERSION}: "
            "move the file away, or name another"
        )
    if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise StoreUnusable(f"{path} is another program's database: name another file")
    # executescript would commit
    for statement in filter(str.strip, _SCHEMA.split(";")):
        connection.execute(statement)
    _create_later_tables(connection)


def _create_later_tables(connection: sqlite3.Connection) -> None:
    for statement in _LATER_TABLES:
        connection.execute(statement)


def add_turns(
    connection: sqlite3.Connection,
    files: TurnFiles,
    session: Session,
    rows: Sequence[TurnRow],
    now: float,
    written: list[str],
) -> int:
    """Insert turns of one rollout and return the bytes then held; 0 if none of the turns is new.

    Args:
        written: gets the names of the files that were written.
    """
    new = [row for row in rows if _insert_turn(connection, files, session.id, row, written)]
    if not new:
        return 0
    size = sum(len(row.packed) + len(row.packed_entries) for row in new)
    _add_to_session(connection, session, len(new), size, now)
    for row in new:
        flag_ambiguous(connection, session.id, row.entries, row.ambiguous)
        put_entries(connection, row.id, row.entries)
    # after all of them: a parent may follow its child
    for row in new:
        if row.parent is not None:
            mark_continued(connection, row.parent)
    connection.execute("UPDATE totals SET turns = turns + ?, size = size + ?", (len(new), size))
    return held_bytes(connection)


def _insert_turn(
    connection: sqlite3.Connection, files: TurnFiles, rollout: str, row: TurnRow, written: list[str]
) -> bool:
    """Insert a turn, and write its file if it is long. False if it is not new."""
    file = files.new_name(connection, row.packed)
    insert = "INSERT OR IGNORE INTO turns VALUES (?, ?, ?, 1, 0, ?, ?, ?)"
    values = (row.id, rollout, row.parent, row.packed_entries, file, b"" if file else row.packed)
    inserted = bool(connection.execute(insert, values).rowcount)
    if file is not None and inserted:
        files.write(file, row.packed)
        written.append(file)
    return inserted


def _add_to_session(
    connection: sqlite3.Connection, session: Session, turns: int, size: int, now: float
) -> None:
    # most sessions have no description, and then one statement is enough
    if _description(session) != _NO_DESCRIPTION:
        query = "SELECT 1 FROM sessions WHERE id = ?"
        if not connection.execute(query, (session.id,)).fetchone():
            save_session(connection, session)
    values = {
        "id": session.id,
        "tenant": session.tenant,
        "explicit": session.explicit,
        "created": session.created,
        "now": now,
        "turns": turns,
        "size": size,
    }
    connection.execute(_ADD_TO_SESSION, values)


def steady_since(connection: sqlite3.Connection, clock: AgeClock, now: float, was_set: bool) -> float:
    """Note that the clock shows `now`; returns since when it has been steady."""
    row = connection.execute("SELECT seen, steady_since FROM clock").fetchone()
    record = clock.next_record(ClockRecord(*row) if row else None, now, was_set)
    connection.execute("DELETE FROM clock")
    connection.execute("INSERT INTO clock VALUES (?, ?)", record)
    return record.steady_since


def held_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of turns and descriptions."""
    size: int = connection.execute("SELECT size FROM totals").fetchone()[0]
    return size


def save_session(connection: sqlite3.Connection, session: Session) -> int:
    """Create or describe a session and return the bytes then held."""
    query, name = "SELECT description_size FROM sessions WHERE id = ?", (session.id,)
    before = connection.execute(query, name).fetchone()
    size = description_size(session)
    values = {
        "id": session.id,
        "tenant": session.tenant,
        "explicit": session.explicit,
        "created": session.created,
        "used": session.used,
        "size": size,
    }
    connection.execute(_SAVE_SESSION, values)
    description = _description(session)
    if description != _NO_DESCRIPTION:
        row = (session.id, *description)
        connection.execute("INSERT OR REPLACE INTO descriptions VALUES (?, ?, ?, ?)", row)
    elif before is not None:
        connection.execute("DELETE FROM descriptions WHERE id = ?", name)
    growth = size - (before[0] if before else 0)
    connection.execute("UPDATE totals SET size = size + ?", (growth,))
    return held_bytes(connection)


def _description(session: Session) -> tuple[bytes, bytes, bytes]:
    return session.defaults, session.overrides, session.metadata


class Removed(NamedTuple):
    """What was removed with some rollouts."""

    evicted: Evicted = Evicted()
    keys: Sequence[bytes] = ()
    """Of the turns."""
    files: Sequence[str] = ()
    """Of the turns: to be deleted after the transaction."""


def remove(connection: sqlite3.Connection, rollouts: Iterable[str]) -> Removed:
    """Remove rollouts with all their turns."""
    removed, turns, size = 0, 0, 0
    keys: list[bytes] = []
    files: list[str] = []
    for rollout in rollouts:
        name = (rollout,)
        session = connection.execute("SELECT turns, size FROM sessions WHERE id = ?", name).fetchone()
        if session is None:
            continue
        removed, turns, size = removed + 1, turns + session[0], size + session[1]
        query = "SELECT id, open, entries, file FROM turns WHERE rollout = ?"
        for turn, open, packed_entries, file in connection.execute(query, name):
            entries = unpack_entries(packed_entries)
            remove_entries(connection, turn, entries, open)
            keys.extend(entry.key for entry in entries)
            if file is not None:
                files.append(file)
        connection.execute("DELETE FROM turns WHERE rollout = ?", name)
        connection.execute("DELETE FROM rewards WHERE rollout = ?", name)
        connection.execute("DELETE FROM feed WHERE rollout = ?", name)
        connection.execute("DELETE FROM descriptions WHERE id = ?", name)
        connection.execute("DELETE FROM sessions WHERE id = ?", name)
    connection.execute("UPDATE totals SET turns = turns - ?, size = size - ?", (turns, size))
    return Removed(Evicted(removed, turns, size), keys, files)


def evict_step(
    connection: sqlite3.Connection, limits: Limits, own: str | None, oldest: float, now: float
) -> Removed:
    """Evict some rollouts last used before `oldest`, and some of the least recently used if too much is held.

    Args:
        own: evicted last, and only if it alone exceeds the limit.
    """
    left, count = held_bytes(connection), 0
    target = eviction_target(limits) if left > limits.max_bytes else left
    chosen: list[str] = []
    query = "SELECT id, used, turns, size FROM sessions WHERE pinned_until <= ? ORDER BY used, id"
    cursor = connection.execute(query, (now,))
    for rollout, used, turns, size in cursor:
        if count >= STEP or (left <= target and used >= oldest):
            break
        if rollout != own:
            chosen.append(rollout)
            count += turns + 1
            left -= size
    cursor.close()
    if not chosen and own is not None:
        query = "SELECT id FROM sessions WHERE id = ? AND size > ? AND pinned_until <= ?"
        chosen = [row[0] for row in connection.execute(query, (own, limits.max_bytes, now))]
    if not chosen:
        return Removed()
    missed = undelivered(connection, chosen)
    removed = remove(connection, chosen)
    _remember_evicted(connection, removed.keys, limits.evicted_keys)
    return removed._replace(evicted=dataclasses.replace(removed.evicted, undelivered=missed))


def _remember_evicted(connection: sqlite3.Connection, keys: Iterable[bytes], limit: int) -> None:
    for chunk in in_chunks(keys):
        rows = ", ".join(["(?)"] * len(chunk))
        connection.execute(f"INSERT OR REPLACE INTO evicted (key) VALUES {rows}", chunk)
    last = connection.execute("SELECT max(seq) FROM evicted").fetchone()[0] or 0
    connection.execute("DELETE FROM evicted WHERE seq <= ?", (last - limit,))


def drop_responses(connection: sqlite3.Connection, limits: Limits, oldest: float) -> int:
    """Drop the oldest responses, at most STEP: those kept before `oldest`, and those that are too much.

    Returns how many were dropped.
    """
    left = connection.execute("SELECT response_bytes FROM totals").fetchone()[0]
    dropped = []
    query = f"SELECT seq, size, kept FROM responses ORDER BY seq LIMIT {STEP}"
    for seq, size, kept in connection.execute(query).fetchall():
        if kept >= oldest and left <= limits.response_bytes:
            break
        dropped.append((seq, size))
        left -= size
    remove_responses(connection, dropped)
    return len(dropped)


def remove_responses(connection: sqlite3.Connection, responses: Sequence[tuple[int, int]]) -> None:
    """Remove responses, given by number and size."""
    connection.executemany("DELETE FROM responses WHERE seq = ?", [(seq,) for seq, _ in responses])
    size = sum(size for _, size in responses)
    connection.execute("UPDATE totals SET response_bytes = response_bytes - ?", (size,))
