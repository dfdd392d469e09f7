"""A store in a file that all processes of one machine share: the default. Or in the memory of one process."""

import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from tokenproxy.record.store import ALL, DESCRIPTION, Before, Evicted, FeedPage, Limits, Session, Unreadable
from tokenproxy.record.turn import Found, IndexedTurn, Turn
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store import sqlite_tables as tables
from tokenproxy.store.eviction import Eviction
from tokenproxy.store.packed import (
    complete_path,
    fill_prompts,
    missing_holders,
    pack_turns,
    pack_value,
    unpack_turns,
    unpack_values,
)
from tokenproxy.store.sqlite_threads import Database, MemoryDatabase

_OPEN = f"""
SELECT turn FROM entries CROSS JOIN turns ON turns.id = turn
WHERE key = ? AND ids = ? AND state = {tables.OPEN} ORDER BY turn DESC LIMIT 1
"""


class SqliteStore:
    """A file on a local disk, whose folder is created if it does not exist; or a database in memory."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        """`path`: of the file; None for a database in memory, which needs no `open`."""
        self.file = path
        self.limits = limits
        self.unreadable = Unreadable()
        self._database = Database(path, self._prepare) if path else MemoryDatabase(self._prepare)
        self._eviction = Eviction(self)

    async def open(self) -> None:
        """See `Store.open`."""
        self._eviction.clock_was_set(time.time())
        await self._database.open()

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._database.aclose()

    async def add(
        self, session: Session, turns: Sequence[IndexedTurn] = (), *, fields: Collection[str] = DESCRIPTION
    ) -> Evicted:
        """See `Store.add`."""
        packed, now = await pack_turns(turns), time.time()
        rows, size = list(zip(turns, packed, strict=True)), sum(map(len, packed))
        held = await self._database.write(
            lambda connection: tables.add_turns(connection, session, rows, now, fields), size
        )
        return await self._eviction.run(session.id) if held > self.limits.max_bytes else Evicted()

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        return await self._database.read(lambda connection: tables.find(connection, keys))

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """See `Store.claim`."""

        def work(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(_OPEN, (key, ids)).fetchone()
            connection.execute(f"UPDATE turns SET state = {tables.CLAIMED} WHERE id = ?", row or ("",))
            return row[0] if row else None

        return await self._database.write(work)

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        query = f"UPDATE turns SET state = {tables.OPEN} WHERE id = ? AND state = {tables.CLAIMED}"
        await self._database.write(lambda connection: connection.execute(query, (turn,)).rowcount)

    async def pin(self, rollout: str, until: float) -> bool:
        """See `Store.pin`."""
        used = f"used = {tables.USED_NOW}"
        query = f"UPDATE sessions SET {used}, pinned_until = max(pinned_until, :until) WHERE id = :id"
        values = {"now": time.time(), "until": until, "id": rollout}
        return await self._database.write(lambda connection: connection.execute(query, values).rowcount > 0)

    async def path(self, turn: str, limit: int = ALL) -> list[Turn]:
        """See `Store.path`."""

        def work(connection: sqlite3.Connection) -> list[Turn]:
            turns = unpack_turns(connection.execute(tables.PATH, (turn, limit)), self.unreadable)
            for holder in missing_holders(turns.values(), turns):
                row = connection.execute(f"{tables.TURNS} WHERE id = ?", (holder,))
                turns |= unpack_turns(row, self.unreadable)
            return complete_path(turn, turns, limit)

        return await self._database.read(work)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        query = f"{tables.TURNS} WHERE rollout = ? ORDER BY id"

        def work(connection: sqlite3.Connection) -> list[Turn]:
            turns = unpack_turns(connection.execute(query, (rollout,)), self.unreadable)
            return fill_prompts(turns.values(), turns)

        return await self._database.read(work)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        query, values = "SELECT id FROM turns WHERE rollout = ? ORDER BY id DESC LIMIT ?", (rollout, limit)
        return await self._database.read(
            lambda connection: [row[0] for row in connection.execute(query, values)]
        )

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        return next(iter(await self._sessions("id = :id", 1, id=rollout)), None)

    async def sessions(self, *, limit: int, tenant: str | None = None, before: float = inf) -> list[Session]:
        """See `Store.sessions`."""
        of_tenant = "" if tenant is None else "tenant = :tenant AND "
        where = f"{of_tenant}used < :before ORDER BY used DESC"
        return await self._sessions(where, limit, tenant=tenant, before=before)

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return await self.remove(rollout, inf)

    async def finish(self, rollout: str, cause: Cause, rewards: Mapping[str, float] | None = None) -> bool:
        """See `Store.finish`."""
        now = time.time()
        return await self._database.write(
            lambda connection: tables.finish(connection, rollout, cause, rewards or {}, now)
        )

    async def feed(self, after: int, *, limit: int, tenant: str | None = None) -> FeedPage:
        """See `Store.feed`."""
        of_tenant = "" if tenant is None else "tenant = :tenant AND "
        where = f"{of_tenant}position > :after"
        values: dict[str, Any] = {"tenant": tenant, "after": after}

        def work(connection: sqlite3.Connection) -> FeedPage:
            _, end = tables.totals(connection)
            if tenant is not None:
                own_end = f"SELECT max(position) FROM sessions WHERE tenant = :tenant AND {tables.PLACED}"
                end = connection.execute(own_end, values).fetchone()[0] or 0
            count = f"SELECT count(*) FROM sessions WHERE {where} AND {tables.PLACED}"
            waiting = connection.execute(count, values).fetchone()[0]
            query = f"{tables.SESSIONS} WHERE {where} ORDER BY position"
            sessions = tables.read_sessions(connection, query, values, limit, self.unreadable)
            return FeedPage(end, waiting, sessions)

        return await self._database.read(work)

    async def put(
        self,
        space: str,
        name: str,
        value: bytes | None,
        *,
        keep_s: float | None = None,
        before: Before = ...,
        most: int = ALL,
    ) -> bool:
        """See `Store.put`."""
        now, most_bytes = time.time(), self.limits.bytes_of(space)
        wanted = before if before is ... else await pack_value(before)
        packed, expires = await pack_value(value), inf if keep_s is None else now + keep_s
        row = (space, name, expires, packed)
        return await self._database.write(
            lambda connection: tables.put(connection, row, now, most_bytes, wanted, most), len(packed)
        )

    async def get(
        self, space: str, names: Sequence[str] | None = None, *, complete: bool = False
    ) -> dict[str, bytes]:
        """See `Store.get`."""
        columns, now = "CAST(name AS BLOB), CAST(value AS BLOB)", time.time()
        query = f"SELECT {columns} FROM kept WHERE space = ? AND expires > ?"
        wanted = [()] if names is None else [(name,) for name in names]
        query += "" if names is None else " AND name = ?"

        def work(connection: sqlite3.Connection) -> dict[str, bytes]:
            found: dict[bytes, bytes] = {}
            for name in wanted:
                found.update(connection.execute(query, (space, now, *name)))
            return unpack_values(found.items(), space, self.unreadable, complete=complete)

        return await self._database.read(work)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        return await self._eviction.of_old(time.time())

    async def oldest(self, after: float, limit: int) -> tuple[int, list[Session]]:
        """See `Evicting.oldest`."""
        query, values = f"{tables.SESSIONS} WHERE used > :after ORDER BY used", {"after": after}

        def work(connection: sqlite3.Connection) -> tuple[int, list[Session]]:
            held, _ = tables.totals(connection)
            return held, tables.read_sessions(connection, query, values, limit, self.unreadable)

        return await self._database.read(work)

    async def remove(self, rollout: str, now: float) -> bool:
        """See `Evicting.remove`."""
        return await self._database.write(
            lambda connection: tables.remove(connection, rollout, now, self.limits.evicted_keys)
        )

    async def _sessions(self, where: str, limit: int, **values: str | float | None) -> list[Session]:
        query = f"{tables.SESSIONS} WHERE {where}"
        return await self._database.read(
            lambda connection: tables.read_sessions(connection, query, values, limit, self.unreadable)
        )

    def _prepare(self, connection: sqlite3.Connection) -> None:
        tables.prepare(connection, self.file)
