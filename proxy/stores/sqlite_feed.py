"""The feed of a SQLite store. See `FeedStore`.

The functions that change something run in a transaction of the caller, so that a reward and the finishing of
its rollout are written together. One process writes at a time: positions become visible in their order.
"""

import sqlite3
import time
from collections.abc import Mapping, Sequence

from proxy.history.feed import Acknowledged, Cause, Consumer, FinishedRollout
from proxy.stores.sqlite_index import in_chunks, question_marks
from proxy.stores.sqlite_sessions import SESSION_COLUMNS, session_from
from proxy.stores.sqlite_threads import Database, MemoryDatabase

FEED_TABLES = (
    """CREATE TABLE IF NOT EXISTS feed (
        position INTEGER NOT NULL PRIMARY KEY, rollout TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
        revision INTEGER NOT NULL, turns INTEGER NOT NULL, cause TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS feed_of_tenant ON feed (tenant, position)",
    """CREATE TABLE IF NOT EXISTS feed_state (
        last INTEGER NOT NULL, idle_used REAL NOT NULL, idle_id TEXT NOT NULL
    )""",
    "INSERT INTO feed_state SELECT 0, 0.0, '' WHERE NOT EXISTS (SELECT 1 FROM feed_state)",
    """CREATE TABLE IF NOT EXISTS consumers (
        tenant TEXT NOT NULL, name TEXT NOT NULL, position INTEGER NOT NULL, at REAL NOT NULL,
        PRIMARY KEY (tenant, name)
    ) WITHOUT ROWID""",
)
"""`last` is the last position; (`idle_used`, `idle_id`) the last session that `finish_idle` looked at."""
_READ = f"""
SELECT position, revision, cause, {SESSION_COLUMNS}
FROM feed JOIN sessions ON sessions.id = feed.rollout LEFT JOIN descriptions ON descriptions.id = sessions.id
"""
IDLE_SESSIONS = (
    "SELECT used, id FROM sessions WHERE (used, id) > (?, ?) AND used < ? ORDER BY used, id LIMIT ?"
)
"""Values: the last use and id that were looked at, time before which the last use was, limit."""
_ACKNOWLEDGE = """
INSERT INTO consumers SELECT :tenant, :name, min(:position, last), :at FROM feed_state WHERE true
ON CONFLICT (tenant, name) DO UPDATE SET position = max(position, excluded.position), at = excluded.at
"""


class SqliteFeed:
    """The feed in the database of a store."""

    def __init__(self, database: Database | MemoryDatabase) -> None:
        self._database = database

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `FeedStore.finish`."""
        now = time.time()
        return await self._database.write(lambda connection: finish(connection, rollout, cause, now))

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `FeedStore.finish_idle`."""
        now = time.time()
        return await self._database.write(lambda connection: _finish_idle(connection, before, limit, now))

    async def read(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `FeedStore.read`."""
        where = "position > ?"
        values: list[str | int] = [after, limit]
        if tenant is not None:
            where, values = "feed.tenant = ? AND position > ?", [tenant, *values]

        def work(connection: sqlite3.Connection) -> list[FinishedRollout]:
            rows = connection.execute(f"{_READ} WHERE {where} ORDER BY position LIMIT ?", values)
            return [
                FinishedRollout(position, revision, Cause(cause), session_from(session))
                for position, revision, cause, *session in rows
            ]

        return await self._database.read(work)

    async def end(self) -> int:
        """See `FeedStore.end`."""

        def work(connection: sqlite3.Connection) -> int:
            last: int = connection.execute("SELECT last FROM feed_state").fetchone()[0]
            return last

        return await self._database.read(work)

    async def acknowledged(self, tenant: str, consumer: str) -> Acknowledged | None:
        """See `FeedStore.acknowledged`."""

        def work(connection: sqlite3.Connection) -> Acknowledged | None:
            query = "SELECT position, at FROM consumers WHERE tenant = ? AND name = ?"
            row = connection.execute(query, (tenant, consumer)).fetchone()
            return Acknowledged(*row) if row else None

        return await self._database.read(work)

    async def acknowledge(self, tenant: str, consumer: str, position: int) -> int:
        """See `FeedStore.acknowledge`."""
        values = {"tenant": tenant, "name": consumer, "position": position, "at": time.time()}

        def work(connection: sqlite3.Connection) -> int:
            connection.execute(_ACKNOWLEDGE, values)
            query = "SELECT position FROM consumers WHERE tenant = ? AND name = ?"
            acknowledged: int = connection.execute(query, (tenant, consumer)).fetchone()[0]
            return acknowledged

        return await self._database.write(work)

    async def forget(self, tenant: str, consumer: str) -> bool:
        """See `FeedStore.forget`."""
        query, values = "DELETE FROM consumers WHERE tenant = ? AND name = ?", (tenant, consumer)
        return await self._database.write(lambda connection: bool(connection.execute(query, values).rowcount))

    async def consumers(self, tenant: str | None = None) -> list[Consumer]:
        """See `FeedStore.consumers`."""
        query = """
            SELECT tenant, name, position,
                (SELECT count(*) FROM feed WHERE feed.tenant = c.tenant AND feed.position > c.position),
                coalesce((
                    SELECT min(position) FROM feed WHERE feed.tenant = c.tenant AND feed.position > c.position
                ), 0)
            FROM consumers AS c WHERE tenant = coalesce(?, tenant) ORDER BY tenant, name
        """

        def work(connection: sqlite3.Connection) -> list[Consumer]:
            rows = connection.execute(query, (tenant,))
            return [Consumer(*row) for row in rows]

        return await self._database.read(work)


def finish(
    connection: sqlite3.Connection,
    rollout: str,
    cause: Cause,
    now: float,
    *,
    changed: bool = False,
    only_again: bool = False,
) -> bool:
    """See `FeedStore.finish`.

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


def finish_rewarded(
    connection: sqlite3.Connection,
    rollout: str,
    before: Mapping[str, float],
    rewards: Mapping[str, float],
    now: float,
) -> None:
    """Finish a rollout whose rewards were set, as `Store.set_rewards` promises.

    Args:
        before: its rewards until then.
        rewards: those that were set.
    """
    if rewards:
        changed = not rewards.items() <= before.items()
        finish(connection, rollout, Cause.REWARD, now, changed=changed, only_again="" not in rewards)


def _finish_idle(connection: sqlite3.Connection, before: float, limit: int, now: float) -> int:
    place = connection.execute("SELECT idle_used, idle_id FROM feed_state").fetchone()
    rows = connection.execute(IDLE_SESSIONS, (*place, before, limit)).fetchall()
    for _, rollout in rows:
        finish(connection, rollout, Cause.IDLE, now)
    if rows:
        connection.execute("UPDATE feed_state SET idle_used = ?, idle_id = ?", rows[-1])
    return len(rows)


def undelivered(connection: sqlite3.Connection, rollouts: Sequence[str]) -> int:
    """Number of these rollouts that are finished, and not acknowledged by every consumer of their tenant."""
    count = 0
    for chunk in in_chunks(rollouts):
        query = f"""
            SELECT count(*) FROM feed WHERE rollout IN ({question_marks(chunk)})
            AND position > (SELECT min(position) FROM consumers WHERE consumers.tenant = feed.tenant)
        """
        count += connection.execute(query, chunk).fetchone()[0]
    return count


def forget_consumers(connection: sqlite3.Connection, before: float) -> None:
    """Remove the consumers that acknowledged nothing since a time in seconds since the epoch."""
    connection.execute("DELETE FROM consumers WHERE at < ?", (before,))
