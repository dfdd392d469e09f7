"""A store in a file that all processes of one machine share: the default. Or in the memory of one process."""

import asyncio
import logging
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path

import msgspec

from proxy.history.store import (
    SECRET_BYTES,
    Cursor,
    Evicted,
    Found,
    IndexEntry,
    Limits,
    Session,
    StoredResponse,
    Usage,
)
from proxy.history.turn import Turn
from proxy.history.vocabulary import Reason
from proxy.stores import sqlite_index
from proxy.stores.eviction import STEP, AgeClock, evict_in_steps
from proxy.stores.packed import (
    complete_path,
    fill_prompts,
    missing_holders,
    pack_entries,
    pack_response,
    pack_turns,
    unpack_response,
    unpack_turn,
)
from proxy.stores.sqlite_documents import SqliteDocuments
from proxy.stores.sqlite_feed import SqliteFeed, finish_rewarded, forget_consumers
from proxy.stores.sqlite_sessions import SESSIONS, session_from
from proxy.stores.sqlite_tables import (
    PATH,
    USED_NOW,
    Removed,
    TurnRow,
    add_turns,
    drop_responses,
    evict_step,
    prepare,
    remove,
    remove_responses,
    save_session,
    steady_since,
)
from proxy.stores.sqlite_threads import Database, MemoryDatabase
from proxy.stores.turn_files import TurnFiles

log = logging.getLogger("tokenproxy")


class SqliteStore:
    """A file on a local disk, whose folder is created if it does not exist; or a database in memory."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        """`path`: of the file; None for a database in memory, which needs no `open`."""
        self.file = path
        self._limits = limits
        self._files = TurnFiles(path)
        self._database = Database(path) if path else MemoryDatabase(self._prepare)
        self.feed = SqliteFeed(self._database)
        self.documents = SqliteDocuments(self._database, limits)
        self._clock = AgeClock(limits.max_age_s)
        self._eviction = asyncio.Lock()

    async def open(self) -> None:
        """See `Store.open`."""
        self._clock.was_set(time.time())
        await self._database.open(self._prepare)

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._database.aclose()

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`."""
        if not turns:
            return Evicted()
        rows = [
            TurnRow(
                turn.id,
                turn.parent,
                turn_entries,
                pack_entries(turn_entries),
                packed,
                turn.reason == Reason.AMBIGUOUS,
            )
            for turn, turn_entries, packed in zip(turns, entries, await pack_turns(turns), strict=True)
        ]
        now = time.time()
        written: list[str] = []

        def work(connection: sqlite3.Connection) -> int:
            # written by a run that was rolled back
            self._files.delete(written)
            written.clear()
            return add_turns(connection, self._files, session, rows, now, written)

        size = await self._database.write(
            work, size=sum(len(row.packed) for row in rows), failed=lambda: self._files.delete(written)
        )
        return await self._keep_limits(size, session.id)

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """See `Store.find`."""
        return await self._database.read(lambda connection: sqlite_index.find(connection, keys))

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""

        def work(connection: sqlite3.Connection) -> set[bytes]:
            found: set[bytes] = set()
            for chunk in sqlite_index.in_chunks(keys):
                query = f"SELECT key FROM evicted WHERE key IN ({sqlite_index.question_marks(chunk)})"
                found.update(row[0] for row in connection.execute(query, chunk))
            return found

        return await self._database.read(work)

    async def claim(self, turn: str) -> bool:
        """See `Store.claim`."""
        return await self._database.write(lambda connection: sqlite_index.claim(connection, turn))

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        await self._database.write(lambda connection: sqlite_index.release(connection, turn))

    async def pin(self, rollout: str, until: float) -> None:
        """See `Store.pin`."""
        query = f"UPDATE sessions SET {USED_NOW}, pinned_until = max(pinned_until, :until) WHERE id = :id"
        values = {"now": time.time(), "until": until, "id": rollout}
        await self._database.write(lambda connection: connection.execute(query, values).rowcount)

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            turns = self._by_id(connection.execute(PATH, (turn,)))
            for holder in missing_holders(turns.values(), turns):
                query = "SELECT packed, file FROM turns WHERE id = ?"
                turns |= self._by_id(connection.execute(query, (holder,)))
            return complete_path(turn, turns)

        return await self._database.read(work)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            query = "SELECT packed, file FROM turns WHERE rollout = ? ORDER BY id"
            turns = self._by_id(connection.execute(query, (rollout,)))
            return fill_prompts(turns.values(), turns)

        return await self._database.read(work)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""

        def work(connection: sqlite3.Connection) -> list[str]:
            query = "SELECT id FROM turns WHERE rollout = ? ORDER BY id DESC LIMIT ?"
            return [row[0] for row in connection.execute(query, (rollout, limit))]

        return await self._database.read(work)

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        size = await self._database.write(lambda connection: save_session(connection, session))
        return await self._keep_limits(size, session.id)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""

        def work(connection: sqlite3.Connection) -> Session | None:
            row = connection.execute(f"{SESSIONS} WHERE sessions.id = ?", (rollout,)).fetchone()
            return session_from(row) if row else None

        return await self._database.read(work)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`."""
        query, values = sessions_query(limit, tenant, before)

        def work(connection: sqlite3.Connection) -> list[Session]:
            return [session_from(row) for row in connection.execute(query, values)]

        return await self._database.read(work)

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""

        removed = await self._database.write(
            lambda connection: remove(connection, [rollout]), after=self._delete_files
        )
        return bool(removed.evicted.rollouts)

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """See `Store.set_rewards`."""
        rows, now = [(rollout, turn, reward) for turn, reward in rewards.items()], time.time()

        def work(connection: sqlite3.Connection) -> bool:
            if not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (rollout,)).fetchone():
                return False
            before = _rewards(connection, rollout)
            connection.executemany("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", rows)
            finish_rewarded(connection, rollout, before, rewards, now)
            return True

        return await self._database.write(work)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        return await self._database.read(lambda connection: _rewards(connection, rollout))

    async def keep_response(self, response: StoredResponse) -> None:
        """See `Store.keep_response`."""
        packed = pack_response(response)
        row = (response.id, response.key, time.time(), len(packed), packed)

        def work(connection: sqlite3.Connection) -> None:
            insert = "INSERT OR IGNORE INTO responses (id, key, kept, size, packed) VALUES (?, ?, ?, ?, ?)"
            if connection.execute(insert, row).rowcount:
                update = "UPDATE totals SET response_bytes = response_bytes + ?"
                connection.execute(update, (len(packed),))
                while drop_responses(connection, self._limits, oldest=0.0) == STEP:
                    pass

        await self._database.write(work)

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """See `Store.responses`."""
        oldest = time.time() - self._limits.response_age_s

        def work(connection: sqlite3.Connection) -> list[StoredResponse]:
            query = "SELECT packed FROM responses WHERE key = ? AND kept >= ? ORDER BY id DESC"
            return [unpack_response(row[0]) for row in connection.execute(query, (key, oldest))]

        return await self._database.read(work)

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""

        def work(connection: sqlite3.Connection) -> bool:
            query = "SELECT seq, size FROM responses WHERE id = ?"
            rows = connection.execute(query, (response.id,)).fetchall()
            remove_responses(connection, rows)
            return bool(rows)

        return await self._database.write(work)

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        query = "SELECT url, change FROM replica_changes WHERE fleet = ?"
        return await self._database.read(lambda connection: dict(connection.execute(query, (fleet,))))

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        query, values = "INSERT OR REPLACE INTO replica_changes VALUES (?, ?, ?)", [fleet, url, change]
        if change is None:
            query, values = "DELETE FROM replica_changes WHERE fleet = ? AND url = ?", [fleet, url]
        await self._database.write(lambda connection: connection.execute(query, values).rowcount)

    async def secret(self) -> bytes:
        """See `Store.secret`."""

        def work(connection: sqlite3.Connection) -> bytes:
            new = secrets.token_bytes(SECRET_BYTES)
            connection.execute("INSERT OR IGNORE INTO secret VALUES (0, ?)", (new,))
            secret: bytes = connection.execute("SELECT value FROM secret").fetchone()[0]
            return secret

        return await self._database.write(work)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now, limits = time.time(), self._limits
        oldest_response = now - limits.response_age_s
        while (
            await self._database.write(lambda connection: drop_responses(connection, limits, oldest_response))
            == STEP
        ):
            pass
        await self.documents.drop_old()
        was_set = self._clock.was_set(now)
        steady = await self._database.write(
            lambda connection: steady_since(connection, self._clock, now, was_set)
        )
        oldest = self._clock.oldest(now, steady)
        await self._database.write(lambda connection: forget_consumers(connection, oldest))
        return await self._evict(None, oldest)

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        query = "SELECT (SELECT count(*) FROM sessions), turns, size FROM totals"
        return await self._database.read(lambda connection: Usage(*connection.execute(query).fetchone()))

    async def _keep_limits(self, size: int, own: str) -> Evicted:
        return await self._evict(own) if size > self._limits.max_bytes else Evicted()

    async def _evict(self, own: str | None, oldest: float = 0.0) -> Evicted:
        async def step() -> Evicted:
            now = time.time()
            removed = await self._database.write(
                lambda connection: evict_step(connection, self._limits, own, oldest, now),
                after=self._delete_files,
            )
            return removed.evicted

        return await evict_in_steps(self._eviction, step)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        prepare(connection, self.file, self._files)

    def _delete_files(self, removed: Removed) -> None:
        self._files.delete(removed.files)

    def _by_id(self, rows: sqlite3.Cursor) -> dict[str, Turn]:
        """Turns from rows of `packed` and `file`, without those whose file is gone."""
        turns = (self._unpack(packed, file) for packed, file in rows)
        return {turn.id: turn for turn in turns if turn is not None}

    def _unpack(self, packed: bytes, file: str | None) -> Turn | None:
        if file is None:
            return unpack_turn(packed)
        try:
            return None if (content := self._files.read(file)) is None else unpack_turn(content)
        except (msgspec.DecodeError, OSError) as error:
            log.error("a turn in %s cannot be read and is ignored: %s", file, error)
            return None


def _rewards(connection: sqlite3.Connection, rollout: str) -> dict[str, float]:
    rows = connection.execute("SELECT turn, reward FROM rewards WHERE rollout = ?", (rollout,)).fetchall()
    # SQLite stores NaN as NULL
    return {turn: nan if reward is None else reward for turn, reward in rows}


def sessions_query(
    limit: int, tenant: str | None, before: Cursor | None
) -> tuple[str, list[str | float | int]]:
    """The query of `Store.sessions` and its values; an index gives the order."""
    place = before or Cursor(inf, "")
    where = "(used, sessions.id) < (?, ?)"
    values: list[str | float | int] = [place.used, place.id]
    if tenant is not None:
        where, values = f"tenant = ? AND {where}", [tenant, *values]
    return f"{SESSIONS} WHERE {where} ORDER BY used DESC, sessions.id DESC LIMIT ?", [*values, limit]
