"""A store in a file that all processes of one machine share: the default.

Turns are MessagePack beside the columns that queries need; `totals` holds running sums, so that no write has
to add anything up.
"""

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf, nan
from pathlib import Path

from proxy.rollout.packed import (
    goal,
    implicit_session,
    in_path_order,
    pack_answer,
    pack_keys,
    pack_turn,
    unpack_answer,
    unpack_keys,
    unpack_turn,
)
from proxy.rollout.sqlite_threads import Database
from proxy.rollout.store import FOUND_AT_MOST, Answer, Evicted, Limits, Session, StoreError, Usage
from proxy.rollout.turn import Turn

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x746F6B70
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
_PATH = """
WITH RECURSIVE up (id) AS (
    VALUES (?) UNION SELECT turns.parent FROM up JOIN turns USING (id) WHERE turns.parent IS NOT NULL
)
SELECT id, packed FROM up JOIN turns USING (id)
"""
_SESSION = "id, explicit, created, used, turns, size, defaults, overrides, metadata"
_SAVE_SESSION = f"""
INSERT INTO sessions ({_SESSION}) VALUES (?, ?, ?, ?, 0, 0, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET explicit = excluded.explicit, created = excluded.created,
    used = excluded.used, defaults = excluded.defaults, overrides = excluded.overrides,
    metadata = excluded.metadata
"""


class SqliteStore:
    """A file on a local disk. Its folder is made if need be."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._database = Database(path)

    async def open(self) -> None:
        """See `Store.open`."""
        await self._database.open(self._prepare)

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._database.aclose()

    async def add(self, turns: Sequence[Turn], keys: Sequence[Sequence[bytes]]) -> Evicted:
        """See `Store.add`."""
        if not turns:
            return Evicted()
        rows = []
        for turn, of_turn in zip(turns, keys, strict=True):
            packed, packed_keys = pack_turn(turn), pack_keys(of_turn)
            size = len(packed) + len(packed_keys)
            rows.append(((turn.id, turn.rollout, turn.parent, size, packed_keys, packed), of_turn))
        rollout, now = turns[0].rollout, time.time()

        def work(connection: sqlite3.Connection) -> Evicted:
            added, size = 0, 0
            for row, of_turn in rows:
                cursor = connection.execute("INSERT OR IGNORE INTO turns VALUES (?, ?, ?, ?, ?, ?)", row)
                if cursor.rowcount:
                    added += 1
                    size += row[3]
                    connection.executemany(
                        "INSERT OR IGNORE INTO keys VALUES (?, ?)", [(key, row[0]) for key in of_turn]
                    )
            if not added:
                return Evicted()
            _make_session(connection, rollout, now)
            connection.execute(
                "UPDATE sessions SET used = max(used, ?), turns = turns + ?, size = size + ? WHERE id = ?",
                (now, added, size, rollout),
            )
            connection.execute("UPDATE totals SET turns = turns + ?, size = size + ?", (added, size))
            return self._shrink(connection, keep=rollout)

        return await self._database.write(work)

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """See `Store.find`."""
        query = f"SELECT turn FROM keys WHERE key = ? ORDER BY turn DESC LIMIT {FOUND_AT_MOST}"

        def work(connection: sqlite3.Connection) -> dict[bytes, list[str]]:
            found = {key: [row[0] for row in connection.execute(query, (key,)).fetchall()] for key in keys}
            return {key: ids for key, ids in found.items() if ids}

        return await self._database.read(work)

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""

        def work(connection: sqlite3.Connection) -> set[bytes]:
            query = "SELECT 1 FROM evicted WHERE key = ?"
            return {key for key in keys if connection.execute(query, (key,)).fetchall()}

        return await self._database.read(work)

    async def path(self, turn_id: str) -> list[Turn]:
        """See `Store.path`."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            rows = connection.execute(_PATH, (turn_id,)).fetchall()
            return in_path_order(turn_id, {row[0]: unpack_turn(row[1]) for row in rows})

        return await self._database.read(work)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            query = "SELECT packed FROM turns WHERE rollout = ? ORDER BY id"
            return [unpack_turn(row[0]) for row in connection.execute(query, (rollout,)).fetchall()]

        return await self._database.read(work)

    async def save_session(self, session: Session) -> None:
        """See `Store.save_session`."""
        await self._database.write(lambda connection: _save_session(connection, session))

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""

        def work(connection: sqlite3.Connection) -> Session | None:
            query = f"SELECT {_SESSION} FROM sessions WHERE id = ?"
            rows = connection.execute(query, (rollout,)).fetchall()
            return _session(rows[0]) if rows else None

        return await self._database.read(work)

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        """See `Store.sessions`."""

        def work(connection: sqlite3.Connection) -> list[Session]:
            query = f"SELECT {_SESSION} FROM sessions WHERE used < ? ORDER BY used DESC, id DESC LIMIT ?"
            rows = connection.execute(query, (inf if before is None else before, limit))
            return [_session(row) for row in rows.fetchall()]

        return await self._database.read(work)

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""

        def work(connection: sqlite3.Connection) -> bool:
            known = connection.execute("SELECT 1 FROM sessions WHERE id = ?", (rollout,)).fetchall()
            _remove(connection, [rollout])
            return bool(known)

        return await self._database.write(work)

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> None:
        """See `Store.set_rewards`."""
        rows, now = [(rollout, turn, reward) for turn, reward in rewards.items()], time.time()

        def work(connection: sqlite3.Connection) -> None:
            _make_session(connection, rollout, now)
            connection.executemany("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", rows)

        await self._database.write(work)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""

        def work(connection: sqlite3.Connection) -> dict[str, float]:
            query = "SELECT turn, reward FROM rewards WHERE rollout = ?"
            rows = connection.execute(query, (rollout,)).fetchall()
            # SQLite keeps NaN as NULL
            return {turn: nan if reward is None else reward for turn, reward in rows}

        return await self._database.read(work)

    async def add_answer(self, answer: Answer) -> None:
        """See `Store.add_answer`."""
        packed = pack_answer(answer)
        row = (answer.id, answer.key, time.time(), len(packed), packed)

        def work(connection: sqlite3.Connection) -> None:
            insert = "INSERT OR IGNORE INTO answers (id, key, since, size, packed) VALUES (?, ?, ?, ?, ?)"
            if connection.execute(insert, row).rowcount:
                connection.execute("UPDATE totals SET answers = answers + ?", (len(packed),))
                self._drop_answers(connection, since=0.0)

        await self._database.write(work)

    async def answers(self, key: bytes) -> list[Answer]:
        """See `Store.answers`."""
        oldest = time.time() - self._limits.answer_age_s

        def work(connection: sqlite3.Connection) -> list[Answer]:
            query = "SELECT packed FROM answers WHERE key = ? AND since >= ? ORDER BY id DESC"
            return [unpack_answer(row[0]) for row in connection.execute(query, (key, oldest)).fetchall()]

        return await self._database.read(work)

    async def take_answer(self, answer: Answer) -> bool:
        """See `Store.take_answer`."""

        def work(connection: sqlite3.Connection) -> bool:
            rows = connection.execute("SELECT seq, size FROM answers WHERE id = ?", (answer.id,)).fetchall()
            _remove_answers(connection, rows)
            return bool(rows)

        return await self._database.write(work)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now = time.time()

        def work(connection: sqlite3.Connection) -> Evicted:
            self._drop_answers(connection, since=now - self._limits.answer_age_s)
            query = "SELECT id FROM sessions WHERE used < ?"
            old = connection.execute(query, (now - self._limits.max_age_s,)).fetchall()
            by_age = self._bury(connection, [row[0] for row in old])
            by_size = self._shrink(connection, keep=None)
            return Evicted(
                by_age.rollouts + by_size.rollouts, by_age.turns + by_size.turns, by_age.size + by_size.size
            )

        return await self._database.write(work)

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        query = "SELECT (SELECT count(*) FROM sessions), turns, size FROM totals"
        return await self._database.read(lambda connection: Usage(*connection.execute(query).fetchone()))

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        if application == _APPLICATION_ID and version == SCHEMA_VERSION:
            return
        if application == _APPLICATION_ID:
            raise StoreError(
                f"{self._path} has version {version} of the tables, and this program knows {SCHEMA_VERSION}: "
                "move the file away, or name another"
            )
        if version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise StoreError(f"{self._path} is another program's database: name another file")
        # executescript would commit
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)

    def _shrink(self, connection: sqlite3.Connection, keep: str | None) -> Evicted:
        """Bury the oldest used if too much is held; `keep` last, and only if the rest is not enough."""
        left = connection.execute("SELECT size FROM totals").fetchone()[0]
        if left <= self._limits.max_bytes:
            return Evicted()
        chosen = []
        cursor = connection.execute("SELECT id, size FROM sessions WHERE turns > 0 ORDER BY used, id")
        for rollout, size in cursor:
            if left <= goal(self._limits):
                break
            if rollout != keep:
                chosen.append(rollout)
                left -= size
        cursor.close()
        if keep is not None and left > self._limits.max_bytes:
            chosen.append(keep)
        return self._bury(connection, chosen)

    def _bury(self, connection: sqlite3.Connection, rollouts: Sequence[str]) -> Evicted:
        turns, size, keys = _remove(connection, rollouts)
        if keys:
            rows = [(key,) for key in keys]
            connection.executemany("INSERT OR REPLACE INTO evicted (key) VALUES (?)", rows)
            last = connection.execute("SELECT max(seq) FROM evicted").fetchone()[0]
            connection.execute("DELETE FROM evicted WHERE seq <= ?", (last - self._limits.evicted_keys,))
        return Evicted(len(rollouts), turns, size)

    def _drop_answers(self, connection: sqlite3.Connection, since: float) -> None:
        """Let the oldest answers go: those kept before `since`, and those that are too much."""
        left = connection.execute("SELECT answers FROM totals").fetchone()[0]
        dropped = []
        cursor = connection.execute("SELECT seq, size, since FROM answers ORDER BY seq")
        for seq, size, kept_since in cursor:
            if kept_since >= since and left <= self._limits.answer_bytes:
                break
            dropped.append((seq, size))
            left -= size
        cursor.close()
        _remove_answers(connection, dropped)


def _session(row: tuple[str, int, float, float, int, int, bytes, bytes, bytes]) -> Session:
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


def _save_session(connection: sqlite3.Connection, session: Session) -> None:
    row = (session.id, session.explicit, session.created, session.used)
    connection.execute(_SAVE_SESSION, (*row, session.defaults, session.overrides, session.metadata))


def _make_session(connection: sqlite3.Connection, rollout: str, now: float) -> None:
    """Make the session of a rollout that has none."""
    if not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (rollout,)).fetchall():
        _save_session(connection, implicit_session(rollout, now))


def _remove(connection: sqlite3.Connection, rollouts: Iterable[str]) -> tuple[int, int, list[bytes]]:
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


def _remove_answers(connection: sqlite3.Connection, answers: Sequence[tuple[int, int]]) -> None:
    """Let answers go, given by number and size."""
    connection.executemany("DELETE FROM answers WHERE seq = ?", [(seq,) for seq, _ in answers])
    size = sum(size for _, size in answers)
    connection.execute("UPDATE totals SET answers = answers - ?", (size,))
