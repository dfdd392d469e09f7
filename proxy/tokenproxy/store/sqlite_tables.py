"""The tables of a SQLite store, and what changes several of them.

Turns are MessagePack next to the columns that queries need; `totals` holds running sums, so that no write has
to add anything up. Everything here runs in a transaction of the caller.
"""

import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenproxy.record.store import Before, Cause, Evicted, IndexEntry, Limits, Session, StoreUnusable
from tokenproxy.store.eviction import STEP, AgeClock, ClockRecord, eviction_target
from tokenproxy.store.packed import description_size, unpack_entries
from tokenproxy.store.turn_files import FILES_SCHEMA, TurnFiles

T = TypeVar("T", bytes, str)

SCHEMA_VERSION = 4
_APPLICATION_ID = 0x746F6B70
_SCHEMA = f"""
CREATE TABLE turns (
    id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, parent TEXT, open INTEGER NOT NULL,
    continued INTEGER NOT NULL, entries BLOB NOT NULL, file TEXT, packed BLOB NOT NULL
);
CREATE INDEX turns_of_rollout ON turns (rollout, id);
CREATE TABLE entries (
    key BLOB NOT NULL, ids BLOB NOT NULL, turn TEXT NOT NULL, PRIMARY KEY (key, ids, turn)
) WITHOUT ROWID;
CREATE TABLE evicted (
    seq INTEGER PRIMARY KEY, key BLOB NOT NULL, ids BLOB NOT NULL, UNIQUE (key, ids)
);
{FILES_SCHEMA}
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
CREATE TABLE kept (
    space TEXT NOT NULL, name TEXT NOT NULL, expires REAL NOT NULL, value BLOB NOT NULL, UNIQUE (space, name)
);
CREATE INDEX kept_by_expiry ON kept (space, expires);
CREATE TABLE kept_bytes (space TEXT NOT NULL PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE feed (
    position INTEGER NOT NULL PRIMARY KEY, rollout TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    revision INTEGER NOT NULL, turns INTEGER NOT NULL, cause TEXT NOT NULL
);
CREATE INDEX feed_of_tenant ON feed (tenant, position);
CREATE TABLE feed_state (last INTEGER NOT NULL, idle_used REAL NOT NULL, idle_id TEXT NOT NULL);
INSERT INTO feed_state VALUES (0, 0.0, '');
CREATE TABLE clock (seen REAL NOT NULL, steady_since REAL NOT NULL);
CREATE TABLE totals (turns INTEGER NOT NULL, size INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
"""`last` of `feed_state` is the last position of the feed; (`idle_used`, `idle_id`) the last session that
`finish_idle` looked at."""
SESSION_COLUMNS = """
sessions.id, sessions.tenant, explicit, ambiguous, created, used, sessions.turns, size, defaults, overrides,
metadata
"""
SESSIONS = f"""
SELECT {SESSION_COLUMNS} FROM sessions LEFT JOIN descriptions ON descriptions.id = sessions.id
"""
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
    :id, :tenant, :explicit, :ambiguous, :created,
    max(:now, coalesce((SELECT max(used) FROM sessions) + 0.000001, 0)), 0, :turns, :size, 0
)
ON CONFLICT (id) DO UPDATE SET {USED_NOW}, turns = turns + :turns, size = size + :size,
    ambiguous = max(ambiguous, :ambiguous)
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


def prepare(connection: sqlite3.Connection, path: Path | None, files: TurnFiles) -> None:
    """Make the tables where there are none, and delete the files that killed processes left.

    Raises:
        StoreUnusable: the file belongs to another program, or has another version.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application == _APPLICATION_ID and version == SCHEMA_VERSION:
        files.delete_unused(connection)
        return
    if application == _APPLICATION_ID:
        raise StoreUnusable(
            f"{path} has version {version} of the tables, and this program needs version {SCHEMA_VERSION}: "
            "export it with the program that wrote it, then move the file away or name another"
        )
    if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise StoreUnusable(f"{path} is another program's database: name another file")
    # executescript would commit
    for statement in filter(str.strip, _SCHEMA.split(";")):
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
        values = [value for key, ids in row.entries for value in (key, ids, row.id)]
        if values:
            # one statement: the module `sqlite3` releases the interpreter lock in each, and may wait for it
            marks = ", ".join(["(?, ?, ?)"] * (len(values) // 3))
            connection.execute(f"INSERT OR IGNORE INTO entries VALUES {marks}", values)
    # after all of them: a parent may follow its child
    for row in new:
        if row.parent is not None:
            connection.execute("UPDATE turns SET open = 0, continued = 1 WHERE id = ?", (row.parent,))
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
        "ambiguous": session.ambiguous,
        "created": session.created,
        "now": now,
        "turns": turns,
        "size": size,
    }
    connection.execute(_ADD_TO_SESSION, values)


def in_chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """The distinct values, in lists short enough for the values of one statement."""
    distinct = list(dict.fromkeys(values))
    for start in range(0, len(distinct), 256):
        yield distinct[start : start + 256]


def question_marks(values: Sequence[object]) -> str:
    """As many as there are values, for SQL's `IN (...)`."""
    return ", ".join("?" * len(values))


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
    entries: Sequence[IndexEntry] = ()
    """Of the turns."""
    files: Sequence[str] = ()
    """Of the turns: to be deleted after the transaction."""


def remove(connection: sqlite3.Connection, rollouts: Iterable[str]) -> Removed:
    """Remove rollouts with all their turns."""
    removed, turns, size = 0, 0, 0
    found_by: list[IndexEntry] = []
    files: list[str] = []
    for rollout in rollouts:
        name = (rollout,)
        session = connection.execute("SELECT turns, size FROM sessions WHERE id = ?", name).fetchone()
        if session is None:
            continue
        removed, turns, size = removed + 1, turns + session[0], size + session[1]
        query = "SELECT id, entries, file FROM turns WHERE rollout = ?"
        for turn, packed_entries, file in connection.execute(query, name):
            entries = unpack_entries(packed_entries)
            delete = "DELETE FROM entries WHERE key = ? AND ids = ? AND turn = ?"
            connection.executemany(delete, [(*entry, turn) for entry in entries])
            found_by += entries
            if file is not None:
                files.append(file)
        connection.execute("DELETE FROM turns WHERE rollout = ?", name)
        connection.execute("DELETE FROM rewards WHERE rollout = ?", name)
        connection.execute("DELETE FROM feed WHERE rollout = ?", name)
        connection.execute("DELETE FROM descriptions WHERE id = ?", name)
        connection.execute("DELETE FROM sessions WHERE id = ?", name)
    connection.execute("UPDATE totals SET turns = turns - ?, size = size - ?", (turns, size))
    return Removed(Evicted(removed, turns, size), found_by, files)


def evict_step(
    connection: sqlite3.Connection,
    limits: Limits,
    own: str | None,
    oldest: float,
    now: float,
    read: Mapping[str, int],
) -> Removed:
    """Evict some rollouts last used before `oldest`, and some of the least recently used if too much is held.

    Args:
        read: the position of the feed that all consumers of a tenant have acknowledged, by tenant.
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
    missed = 0
    for part in in_chunks(chosen):
        query = f"SELECT tenant, position FROM feed WHERE rollout IN ({question_marks(part)})"
        missed += sum(
            position > read.get(tenant, position) for tenant, position in connection.execute(query, part)
        )
    removed = remove(connection, chosen)
    connection.executemany(
        "INSERT OR REPLACE INTO evicted (key, ids) VALUES (?, ?)", list(dict.fromkeys(removed.entries))
    )
    last = connection.execute("SELECT max(seq) FROM evicted").fetchone()[0] or 0
    connection.execute("DELETE FROM evicted WHERE seq <= ?", (last - limits.evicted_keys,))
    return removed._replace(evicted=dataclasses.replace(removed.evicted, undelivered=missed))


def session_from(row: Sequence[Any]) -> Session:
    """A session from a row of SESSION_COLUMNS."""
    rollout, tenant, explicit, ambiguous, created, used, turns, size, *description = row
    return Session(
        id=rollout,
        tenant=tenant,
        explicit=bool(explicit),
        ambiguous=bool(ambiguous),
        created=created,
        used=used,
        turns=turns,
        size=size,
        **{
            name: value
            for name, value in zip(("defaults", "overrides", "metadata"), description, strict=True)
            if value is not None
        },
    )


def finish(
    connection: sqlite3.Connection,
    rollout: str,
    cause: Cause,
    now: float,
    *,
    changed: bool = False,
    only_again: bool = False,
) -> bool:
    """See `Store.finish`.

    Args:
        changed: whether more than its turns changed since it was finished.
        only_again: change nothing unless it is in the feed already.
    """
    query = """
        SELECT sessions.tenant, sessions.turns, feed.turns, revision
        FROM sessions LEFT JOIN feed ON feed.rollout = sessions.id WHERE sessions.id = ?
    """
    row = connection.execute(query, (rollout,)).fetchone()
    if row is None:
        return False
    tenant, turns, finished_turns, revision = row
    unchanged = finished_turns == turns and not changed
    if not turns or unchanged or (only_again and revision is None):
        return False
    connection.execute("UPDATE feed_state SET last = max(last + 1, ?)", (int(now * 1e6),))
    insert = "INSERT OR REPLACE INTO feed SELECT last, ?, ?, ?, ?, ? FROM feed_state"
    connection.execute(insert, (rollout, tenant, (revision or 0) + 1, turns, cause))
    return True


class Kept(NamedTuple):
    """A value of a space, as a row of its table."""

    space: str
    name: str
    expires: float
    value: bytes


def put(connection: sqlite3.Connection, row: Kept, now: float, most: int, before: Before) -> bool:
    """See `Store.put`. `most`: bytes that the space may hold."""
    drop_expired(connection, row.space, now)
    query = "SELECT value, expires > ? FROM kept WHERE space = ? AND name = ?"
    held, valid = connection.execute(query, (now, *row[:2])).fetchone() or (b"", False)
    if len(row.value) > most or before not in (..., held if valid else None):
        return False
    connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", row)
    _grow(connection, row.space, len(row.value) - len(held))
    query = "SELECT bytes FROM kept_bytes WHERE space = ?"
    while connection.execute(query, (row.space,)).fetchone()[0] > most:
        first = "SELECT rowid, length(value) FROM kept WHERE space = ? ORDER BY expires, rowid LIMIT 1"
        _drop(connection, row.space, connection.execute(first, (row.space,)).fetchall())
    return True


def take(connection: sqlite3.Connection, space: str, name: str, now: float) -> bytes | None:
    """See `Store.take`."""
    query = "SELECT rowid, length(value), value FROM kept WHERE space = ? AND name = ? AND expires > ?"
    row = connection.execute(query, (space, name, now)).fetchone()
    _drop(connection, space, [row[:2]] if row else [])
    return row[2] if row else None


def drop_expired(connection: sqlite3.Connection, space: str, now: float) -> None:
    """Drop some of the values that expired."""
    query = "SELECT rowid, length(value) FROM kept WHERE space = ? AND expires <= ? ORDER BY expires LIMIT ?"
    _drop(connection, space, connection.execute(query, (space, now, STEP)).fetchall())


def _drop(connection: sqlite3.Connection, space: str, rows: Sequence[tuple[int, int]]) -> None:
    connection.executemany("DELETE FROM kept WHERE rowid = ?", [(number,) for number, _ in rows])
    _grow(connection, space, -sum(size for _, size in rows))


def _grow(connection: sqlite3.Connection, space: str, size: int) -> None:
    if size:
        add = """
            INSERT INTO kept_bytes VALUES (?, ?)
            ON CONFLICT (space) DO UPDATE SET bytes = bytes + excluded.bytes
        """
        connection.execute(add, (space, size))
