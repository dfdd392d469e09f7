"""A store in a file that all processes of one machine share: the default."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path

from proxy.history.store import FOUND_AT_MOST, Evicted, Limits, Session, StoredResponse, Usage
from proxy.history.turn import Turn
from proxy.stores.packed import (
    in_path_order,
    pack_keys,
    pack_response,
    pack_turn,
    together,
    unpack_response,
    unpack_turn,
)
from proxy.stores.room import Room, repeat
from proxy.stores.sqlite_tables import (
    PATH,
    SESSION,
    bury_much,
    bury_old,
    drop_answers,
    held,
    make_session,
    prepare,
    remove,
    remove_answers,
    save_session,
    session_of,
)
from proxy.stores.sqlite_threads import Database


class SqliteStore:
    """A file on a local disk. Its folder is made if need be."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.file = path
        self._limits = limits
        self._database = Database(path)
        self._room = Room()

    async def open(self) -> None:
        """See `Store.open`."""
        await self._database.open(lambda connection: prepare(connection, self.file))

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

        def work(connection: sqlite3.Connection) -> int:
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
                return 0
            make_session(connection, rollout, now)
            connection.execute(
                "UPDATE sessions SET used = max(used, ?), turns = turns + ?, size = size + ? WHERE id = ?",
                (now, added, size, rollout),
            )
            connection.execute("UPDATE totals SET turns = turns + ?, size = size + ?", (added, size))
            return held(connection)

        size = await self._database.write(work)
        return await self._shrink(rollout) if size > self._limits.max_bytes else Evicted()

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
            rows = connection.execute(PATH, (turn_id,)).fetchall()
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
        await self._database.write(lambda connection: save_session(connection, session))

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""

        def work(connection: sqlite3.Connection) -> Session | None:
            query = f"SELECT {SESSION} FROM sessions WHERE id = ?"
            rows = connection.execute(query, (rollout,)).fetchall()
            return session_of(rows[0]) if rows else None

        return await self._database.read(work)

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        """See `Store.sessions`."""

        def work(connection: sqlite3.Connection) -> list[Session]:
            query = f"SELECT {SESSION} FROM sessions WHERE used < ? ORDER BY used DESC, id DESC LIMIT ?"
            rows = connection.execute(query, (inf if before is None else before, limit))
            return [session_of(row) for row in rows.fetchall()]

        return await self._database.read(work)

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""

        def work(connection: sqlite3.Connection) -> bool:
            known = connection.execute("SELECT 1 FROM sessions WHERE id = ?", (rollout,)).fetchall()
            remove(connection, [rollout])
            return bool(known)

        return await self._database.write(work)

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> None:
        """See `Store.set_rewards`."""
        rows, now = [(rollout, turn, reward) for turn, reward in rewards.items()], time.time()

        def work(connection: sqlite3.Connection) -> None:
            make_session(connection, rollout, now)
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

    async def keep_response(self, answer: StoredResponse) -> None:
        """See `Store.keep_response`."""
        packed = pack_response(answer)
        row = (answer.id, answer.key, time.time(), len(packed), packed)

        def work(connection: sqlite3.Connection) -> None:
            insert = "INSERT OR IGNORE INTO answers (id, key, since, size, packed) VALUES (?, ?, ?, ?, ?)"
            if connection.execute(insert, row).rowcount:
                connection.execute("UPDATE totals SET answers = answers + ?", (len(packed),))
                drop_answers(connection, self._limits, since=0.0)

        await self._database.write(work)

    async def answers(self, key: bytes) -> list[StoredResponse]:
        """See `Store.answers`."""
        oldest = time.time() - self._limits.answer_age_s

        def work(connection: sqlite3.Connection) -> list[StoredResponse]:
            query = "SELECT packed FROM answers WHERE key = ? AND since >= ? ORDER BY id DESC"
            return [unpack_response(row[0]) for row in connection.execute(query, (key, oldest)).fetchall()]

        return await self._database.read(work)

    async def take_response(self, answer: StoredResponse) -> bool:
        """See `Store.take_response`."""

        def work(connection: sqlite3.Connection) -> bool:
            rows = connection.execute("SELECT seq, size FROM answers WHERE id = ?", (answer.id,)).fetchall()
            remove_answers(connection, rows)
            return bool(rows)

        return await self._database.write(work)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now, limits = time.time(), self._limits
        oldest_answer, oldest = now - limits.answer_age_s, now - limits.max_age_s
        await self._database.write(lambda connection: drop_answers(connection, limits, since=oldest_answer))
        old = await repeat(
            lambda: self._database.write(lambda connection: bury_old(connection, limits, oldest))
        )
        usage = await self.usage()
        return together(old, await self._shrink(None) if usage.size > limits.max_bytes else Evicted())

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        query = "SELECT (SELECT count(*) FROM sessions), turns, size FROM totals"
        return await self._database.read(lambda connection: Usage(*connection.execute(query).fetchone()))

    async def _shrink(self, keep: str | None) -> Evicted:
        def work(connection: sqlite3.Connection) -> Evicted:
            return bury_much(connection, self._limits, keep)

        return await self._room.make(lambda: self._database.write(work))
