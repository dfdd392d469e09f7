"""The tables of a SQLite store, and what changes several of them.

Turns are MessagePack next to the columns that queries need; triggers keep the sums that limits need, so that
no write has to add anything up. Everything here runs in a transaction of the caller.
"""

import heapq
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from tokenproxy.record.store import (
    ALL,
    DAMAGED,
    DESCRIPTION,
    LAST_POSITION,
    LATEST_S,
    MOST_BYTES,
    Before,
    Session,
    StoreUnusable,
    Unreadable,
)
from tokenproxy.record.turn import (
    FOUND_AT_MOST,
    Candidate,
    CandidateGroup,
    Found,
    IndexedTurn,
    IndexEntry,
    request_time,
)
from tokenproxy.store.packed import is_damaged, pack_entries, text, unpack_entries

SCHEMA_VERSION = 7
_APPLICATION_ID = 0x746F6B70
_EXPIRED_AT_ONCE = 512
_KEYS_AT_ONCE = 256
_SCHEMA = f"""
CREATE TABLE turns (
    id TEXT NOT NULL UNIQUE, rollout TEXT NOT NULL, parent TEXT, state INTEGER NOT NULL,
    entries BLOB NOT NULL, packed BLOB NOT NULL
);
CREATE INDEX turns_of_rollout ON turns (rollout, id);
CREATE TABLE entries (
    key BLOB NOT NULL, ids BLOB NOT NULL, turn TEXT NOT NULL, PRIMARY KEY (key, ids, turn)
) WITHOUT ROWID;
CREATE TABLE evicted (
    seq INTEGER PRIMARY KEY, key BLOB NOT NULL, ids BLOB NOT NULL, UNIQUE (key, ids)
);
CREATE TABLE sessions (
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, explicit INTEGER NOT NULL, ambiguous INTEGER NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, turns INTEGER NOT NULL, size INTEGER NOT NULL,
    sampled_ids INTEGER NOT NULL, first_turn REAL NOT NULL,
    defaults BLOB NOT NULL, overrides BLOB NOT NULL, metadata BLOB NOT NULL, limits BLOB NOT NULL,
    policy BLOB NOT NULL, rewards BLOB NOT NULL,
    pinned_until REAL NOT NULL, position INTEGER NOT NULL, revision INTEGER NOT NULL, cause TEXT NOT NULL,
    finished_turns INTEGER NOT NULL
);
CREATE INDEX sessions_by_use ON sessions (used);
CREATE INDEX sessions_of_tenant_by_use ON sessions (tenant, used);
CREATE INDEX feed ON sessions (position);
CREATE INDEX feed_of_tenant ON sessions (tenant, position);
CREATE TABLE kept (
    space TEXT NOT NULL, name TEXT NOT NULL, expires REAL NOT NULL, value BLOB NOT NULL, UNIQUE (space, name)
);
CREATE INDEX kept_by_expiry ON kept (space, expires);
CREATE TABLE kept_bytes (space TEXT NOT NULL PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE totals (size INTEGER NOT NULL, last INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    UPDATE totals SET size = size + new.size; END;
CREATE TRIGGER session_changed AFTER UPDATE OF size ON sessions BEGIN
    UPDATE totals SET size = size + new.size - old.size; END;
CREATE TRIGGER session_removed AFTER DELETE ON sessions BEGIN
    UPDATE totals SET size = size - old.size; END;
CREATE TRIGGER value_added AFTER INSERT ON kept BEGIN
    INSERT INTO kept_bytes VALUES (new.space, length(new.value))
    ON CONFLICT (space) DO UPDATE SET bytes = bytes + excluded.bytes; END;
CREATE TRIGGER value_removed AFTER DELETE ON kept BEGIN
    UPDATE kept_bytes SET bytes = bytes - length(old.value) WHERE space = old.space; END;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
"""`last` of `totals` is the last position of the feed."""
CONTINUED, OPEN, CLAIMED = 2, 3, 4
"""Each `state` of a turn takes one byte, so that SQLite changes one page and does not write the whole turn
again: 0 and 1 take none."""
_STATEMENTS = [statement.strip() for statement in _SCHEMA.split(";\n") if statement.strip()]
_CREATED = {" ".join(each.split()) for each in _STATEMENTS if each.startswith("CREATE")}
"""What SQLite keeps of the statements, each as one line."""
FIELDS = Session.__struct_fields__
"""The first columns of `sessions`."""
_TEXTS = ("id", "tenant", "cause")
_COLUMNS = [f"CAST({field} AS BLOB)" if field in _TEXTS else field for field in FIELDS]
SESSIONS = f"SELECT {', '.join(_COLUMNS)} FROM sessions"
"""Texts as bytes, here and below: one that is damaged may be none."""
TURNS = "SELECT CAST(id AS BLOB), CAST(packed AS BLOB) FROM turns"
USED_NOW = f"max(:now, (SELECT coalesce(max(used), 0) FROM sessions WHERE used < {LATEST_S}) + 0.000001)"
"""Marks a session as used now: the last of all, even if the clock was set back. A damaged time is ignored."""
PLACED = f"position < {LAST_POSITION}"
"""A text, which a position may be if it is damaged, is greater than all numbers."""
PATH = """
WITH RECURSIVE up (id) AS (
    VALUES (?) UNION SELECT turns.parent FROM up JOIN turns USING (id) WHERE turns.parent IS NOT NULL
    LIMIT ?
)
SELECT CAST(id AS BLOB), CAST(packed AS BLOB) FROM up JOIN turns USING (id)
"""
_ADD_TO_SESSION = f"""
INSERT INTO sessions VALUES (
    :id, :tenant, :explicit, :ambiguous, :created, {USED_NOW}, :turns, :size + :described, :sampled, :first,
    {", ".join(f":{field}" for field in DESCRIPTION)}, :rewards, 0, 0, 0, '', 0
)
ON CONFLICT (id) DO UPDATE SET
    used = excluded.used, turns = turns + :turns, ambiguous = max(ambiguous, :ambiguous),
    sampled_ids = sampled_ids + :sampled, first_turn = CASE first_turn WHEN 0 THEN :first ELSE first_turn END,
    size = size + :size
"""
_CANDIDATES = f"""
SELECT turn, rollout FROM entries CROSS JOIN turns ON turns.id = turn WHERE key = ? AND ids = ?
ORDER BY turn DESC LIMIT {FOUND_AT_MOST}
"""


def prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    """Make the tables where there are none.

    Raises:
        StoreUnusable: the file belongs to another program, or has another version.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    # a version of the program may have changed a table without giving it another number
    found = {
        " ".join(row[0].split()) for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql > ''")
    }
    if application == _APPLICATION_ID and version == SCHEMA_VERSION and found >= _CREATED:
        return
    if application == _APPLICATION_ID:
        differs = "other columns or triggers" if version == SCHEMA_VERSION else f"version {version}"
        raise StoreUnusable(
            f"{path} has {differs} of the tables, and this program needs version {SCHEMA_VERSION}: "
            "export it with the program that wrote it, then move the file away or name another"
        )
    if version or found:
        raise StoreUnusable(f"{path} is another program's database: name another file")
    # executescript would commit
    for statement in _STATEMENTS:
        connection.execute(statement)


Row = tuple[IndexedTurn, bytes]
"""A turn, and the same packed."""


def add_turns(
    connection: sqlite3.Connection, session: Session, rows: Sequence[Row], now: float, fields: Collection[str]
) -> int:
    """Insert turns of one rollout, or describe it; returns the bytes then held, 0 if nothing changed."""
    insert = f"INSERT OR IGNORE INTO turns VALUES (?, ?, ?, {OPEN}, ?, ?)"
    new: list[IndexedTurn] = []
    size = 0
    for indexed, data in rows:
        turn, entries = indexed.turn, pack_entries(indexed.entries)
        if connection.execute(insert, (turn.id, session.id, turn.parent, entries, data)).rowcount:
            new.append(indexed)
            size += len(data) + len(entries)
    if rows and not new:
        return 0
    values = asdict(session) | {"turns": len(new), "size": size, "now": now}
    values |= {
        "described": session.description_bytes,
        "sampled": sum([turn.completion_tokens for turn, _ in new]),
    }
    values["first"] = min([request_time(turn.id) for turn, _ in new], default=0.0)
    values |= {"ambiguous": session.ambiguous and bool(new), "rewards": msgspec.msgpack.encode({})}
    statement = _ADD_TO_SESSION
    if not rows:
        statement += "".join([f" + length(:{field}) - length({field})" for field in fields])
        statement += "".join([f", {name} = :{name}" for name in ("tenant", "explicit", "created", *fields)])
    connection.execute(statement, values)
    for turn, of_turn in new:
        values_of_row = [value for key, ids in of_turn for value in (key, ids, turn.id)]
        if values_of_row:
            # one statement: the module `sqlite3` releases the interpreter lock in each, and may wait for it
            marks = ", ".join(["(?, ?, ?)"] * (len(values_of_row) // 3))
            connection.execute(f"INSERT OR IGNORE INTO entries VALUES {marks}", values_of_row)
    # after all of them: a parent may follow its child
    for turn, _ in new:
        if turn.parent is not None:
            connection.execute(f"UPDATE turns SET state = {CONTINUED} WHERE id = ?", (turn.parent,))
    return totals(connection, restore=True)[0]


def _is_below(value: object, end: int) -> bool:
    return isinstance(value, int) and 0 <= value < end


def totals(connection: sqlite3.Connection, *, restore: bool = False) -> tuple[int, int]:
    """Bytes of turns and descriptions, and the last position of the feed. Added up if they are damaged.

    Args:
        restore: write them again then.
    """
    rows = connection.execute("SELECT size, last FROM totals").fetchall()
    if len(rows) == 1 and _is_below(rows[0][0], MOST_BYTES) and _is_below(rows[0][1], LAST_POSITION):
        return rows[0][0], rows[0][1]
    size = f"SELECT coalesce(sum(size), 0) FROM sessions WHERE size BETWEEN 0 AND {MOST_BYTES}"
    last = f"SELECT coalesce(max(position), 0) FROM sessions WHERE {PLACED}"
    found: tuple[int, int] = connection.execute(f"SELECT ({size}), ({last})").fetchone()
    if restore:
        connection.execute("DELETE FROM totals")
        connection.execute("INSERT INTO totals VALUES (?, ?)", found)
    return found


def read_sessions(
    connection: sqlite3.Connection, query: str, values: Mapping[str, Any], limit: int, unreadable: Unreadable
) -> list[Session]:
    """The first sessions that a query, which begins with `SESSIONS`, finds; without those that are damaged.

    Args:
        limit: of the sessions that are returned: fewer means that there are no more.
    """
    sessions: list[Session] = []
    # rows are read one by one, so that a query without LIMIT costs no more
    with closing(connection.execute(query, values)) as rows:
        while len(sessions) < limit and (row := rows.fetchone()):
            if (session := unreadable.read(f"session {text(row[0])}", _session, row)) is not None:
                sessions.append(session)
    return sessions


def _session(row: Sequence[Any]) -> Session:
    fields = dict(zip(FIELDS, row, strict=True))
    texts = {name: fields[name].decode() for name in _TEXTS}
    rewards = msgspec.msgpack.decode(fields["rewards"])
    return msgspec.convert({**fields, **texts, "rewards": rewards}, Session, strict=False)


def find(connection: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Found]:
    """See `Store.find`."""
    groups: dict[bytes, dict[bytes, tuple[int, str, int]]] = {}
    distinct = list(dict.fromkeys(keys))
    for start in range(0, len(distinct), _KEYS_AT_ONCE):
        chunk = distinct[start : start + _KEYS_AT_ONCE]
        marks = ", ".join("?" * len(chunk))
        query = f"""
            SELECT key, ids, count(*), max(turn), 0 FROM entries WHERE key IN ({marks}) GROUP BY key, ids
            UNION ALL SELECT key, ids, 0, '', 1 FROM evicted WHERE key IN ({marks})
        """
        for key, ids, count, newest, evicted in connection.execute(query, [*chunk, *chunk]):
            before = groups.setdefault(key, {}).get(ids, (0, "", 0))
            groups[key][ids] = (before[0] + count, newest or before[1], before[2] + evicted)
    found = {}
    for key, of_key in groups.items():
        listed = []
        for ids, (count, _, evicted) in heapq.nlargest(
            FOUND_AT_MOST, of_key.items(), key=lambda item: item[1][1]
        ):
            rows = connection.execute(_CANDIDATES, (key, ids)) if count else ()
            candidates = [Candidate(*row) for row in rows] + [Candidate("", "")] * evicted
            listed.append(CandidateGroup(ids, count + evicted, candidates[:FOUND_AT_MOST]))
        found[key] = Found(sum(count + evicted for count, _, evicted in of_key.values()), listed)
    return found


def remove(connection: sqlite3.Connection, rollout: str, now: float, evicted_keys: int) -> bool:
    """See `Evicting.remove`. `evicted_keys`: how many are remembered."""
    delete = "DELETE FROM sessions WHERE id = ? AND pinned_until <= ?"
    if not connection.execute(delete, (rollout, now)).rowcount:
        return False
    found_by: dict[IndexEntry, None] = {}
    rows = connection.execute("SELECT id, CAST(entries AS BLOB) FROM turns WHERE rollout = ?", (rollout,))
    for turn, packed_entries in rows.fetchall():
        entries = unpack_entries(packed_entries)
        delete = "DELETE FROM entries WHERE key = ? AND ids = ? AND turn = ?"
        connection.executemany(delete, [(*entry, turn) for entry in entries])
        found_by |= dict.fromkeys(entries)
    connection.execute("DELETE FROM turns WHERE rollout = ?", (rollout,))
    if now < inf:
        connection.executemany("INSERT OR REPLACE INTO evicted (key, ids) VALUES (?, ?)", list(found_by))
        forget = "DELETE FROM evicted WHERE seq <= (SELECT max(seq) FROM evicted) - ?"
        connection.execute(forget, (evicted_keys,))
    return True


def finish(
    connection: sqlite3.Connection, rollout: str, cause: str, rewards: Mapping[str, float], now: float
) -> bool:
    """See `Store.finish`."""
    query = "SELECT turns, finished_turns, position, rewards FROM sessions WHERE id = ?"
    row = connection.execute(query, (rollout,)).fetchone()
    if row is None:
        return False
    turns, finished_turns, position, packed = row
    try:
        before = msgspec.msgpack.decode(packed, type=dict[str, float])
    except DAMAGED:  # the session is not read until it has rewards that can be
        before = {}
    changed = not rewards.items() <= before.items()
    if changed:
        update = "UPDATE sessions SET rewards = ? WHERE id = ?"
        connection.execute(update, (msgspec.msgpack.encode({**before, **rewards}), rollout))
    of_turns_alone = bool(rewards) and "" not in rewards
    if not turns or (turns == finished_turns and not changed) or (of_turns_alone and not position):
        return False
    totals(connection, restore=True)
    connection.execute("UPDATE totals SET last = max(last + 1, ?)", (int(now * 1e6),))
    update = """
        UPDATE sessions SET position = (SELECT last FROM totals), revision = revision + 1, cause = ?,
            finished_turns = turns WHERE id = ?
    """
    connection.execute(update, (cause, rollout))
    return True


Kept = tuple[str, str, float, bytes]
"""The space of a value, its name, when it expires, and the packed value; empty to remove the one that is
there."""


def put(
    connection: sqlite3.Connection, row: Kept, now: float, most_bytes: int, before: Before, most: int
) -> bool:
    """See `Store.put`. `most_bytes`: that the space may hold; `before`: packed, empty for no value."""
    space, name, _, value = row
    expired = "SELECT rowid FROM kept WHERE space = ? AND expires <= ? ORDER BY expires LIMIT ?"
    delete = "DELETE FROM kept WHERE rowid IN "
    connection.execute(f"{delete} ({expired})", (space, now, _EXPIRED_AT_ONCE))
    query = "SELECT CAST(value AS BLOB) FROM kept WHERE space = ? AND name = ? AND expires > ?"
    held = connection.execute(query, (space, name, now)).fetchone()
    there = b"" if held is None or (before == b"" and is_damaged(held[0])) else held[0]
    if len(value) > most_bytes or before not in (..., there):
        return False
    if held is None and most < ALL:
        group = name[: name.rfind("/") + 1]
        count = "SELECT count(*) FROM kept WHERE space = ? AND substr(name, 1, ?) = ?"
        if connection.execute(count, (space, len(group), group)).fetchone()[0] >= most:
            return False
    connection.execute("DELETE FROM kept WHERE space = ? AND name = ?", (space, name))
    if not value:
        return held is not None
    connection.execute("INSERT INTO kept VALUES (?, ?, ?, ?)", row)
    first = "SELECT rowid FROM kept WHERE space = ? ORDER BY expires, rowid LIMIT 1"
    query = "SELECT bytes FROM kept_bytes WHERE space = ?"
    while connection.execute(query, (space,)).fetchone()[0] > most_bytes:
        connection.execute(f"{delete} ({first})", (space,))
    return True
