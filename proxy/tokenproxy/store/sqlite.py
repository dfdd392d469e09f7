"""A store in a file that all processes of one machine share: the default. Or in the memory of one process."""

import asyncio
import heapq
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path

import msgspec

from tokenproxy.record.consumers import CONSUMERS, acknowledged_by_all
from tokenproxy.record.store import (
    FOUND_AT_MOST,
    Before,
    Candidate,
    CandidateGroup,
    Cause,
    Cursor,
    Evicted,
    FeedState,
    FinishedRollout,
    Found,
    IndexEntry,
    Limits,
    Session,
    Usage,
)
from tokenproxy.record.turn import Turn
from tokenproxy.store.eviction import AgeClock, evict_in_steps
from tokenproxy.store.packed import (
    complete_path,
    fill_prompts,
    missing_holders,
    pack_entries,
    pack_turns,
    pack_value,
    unpack_turn,
    unpack_value,
)
from tokenproxy.store.sqlite_tables import (
    PATH,
    SESSION_COLUMNS,
    SESSIONS,
    USED_NOW,
    Kept,
    Removed,
    TurnRow,
    add_turns,
    drop_expired,
    evict_step,
    finish,
    in_chunks,
    prepare,
    put,
    question_marks,
    remove,
    save_session,
    session_from,
    steady_since,
    take,
)
from tokenproxy.store.sqlite_threads import Database, MemoryDatabase
from tokenproxy.store.turn_files import TurnFiles

log = logging.getLogger("tokenproxy")

_CANDIDATES = f"""
SELECT turn, rollout FROM entries CROSS JOIN turns ON turns.id = turn WHERE key = ? AND ids = ?
ORDER BY turn DESC LIMIT {FOUND_AT_MOST}
"""
_OPEN = """
SELECT turn FROM entries CROSS JOIN turns ON turns.id = turn WHERE key = ? AND ids = ? AND open
ORDER BY turn DESC LIMIT 1
"""
_FEED = f"""
SELECT position, revision, cause, {SESSION_COLUMNS}
FROM feed JOIN sessions ON sessions.id = feed.rollout LEFT JOIN descriptions ON descriptions.id = sessions.id
"""


class SqliteStore:
    """A file on a local disk, whose folder is created if it does not exist; or a database in memory."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        """`path`: of the file; None for a database in memory, which needs no `open`."""
        self.file = path
        self.limits = limits
        self._files = TurnFiles(path)
        self._database = Database(path) if path else MemoryDatabase(self._prepare)
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
            TurnRow(turn.id, turn.parent, turn_entries, pack_entries(turn_entries), packed)
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

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        return await self._database.read(lambda connection: _find(connection, keys))

    async def claim(self, key: bytes, ids: bytes) -> str | None:
        """See `Store.claim`."""

        def work(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(_OPEN, (key, ids)).fetchone()
            connection.execute("UPDATE turns SET open = 0 WHERE id = ?", row or ("",))
            return row[0] if row else None

        return await self._database.write(work)

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        query = "UPDATE turns SET open = 1 WHERE id = ? AND NOT continued"
        await self._database.write(lambda connection: connection.execute(query, (turn,)).rowcount)

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
            changed = not rewards.items() <= _rewards(connection, rollout).items()
            connection.executemany("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", rows)
            if rewards:
                only_again = "" not in rewards
                finish(connection, rollout, Cause.REWARD, now, changed=changed, only_again=only_again)
            return True

        return await self._database.write(work)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        return await self._database.read(lambda connection: _rewards(connection, rollout))

    async def finish(self, rollout: str, cause: Cause) -> bool:
        """See `Store.finish`."""
        now = time.time()
        return await self._database.write(lambda connection: finish(connection, rollout, cause, now))

    async def finish_idle(self, before: float, limit: int) -> int:
        """See `Store.finish_idle`."""
        now = time.time()
        query = """
            SELECT used, id FROM sessions, feed_state
            WHERE (used, id) > (idle_used, idle_id) AND used < ? ORDER BY used, id LIMIT ?
        """

        def work(connection: sqlite3.Connection) -> int:
            rows = connection.execute(query, (before, limit)).fetchall()
            for _, rollout in rows:
                finish(connection, rollout, Cause.IDLE, now)
            if rows:
                connection.execute("UPDATE feed_state SET idle_used = ?, idle_id = ?", rows[-1])
            return len(rows)

        return await self._database.write(work)

    async def finished(self, after: int, *, limit: int, tenant: str | None = None) -> list[FinishedRollout]:
        """See `Store.finished`."""
        where = "position > ?"
        values: list[str | int] = [after, limit]
        if tenant is not None:
            where, values = "feed.tenant = ? AND position > ?", [tenant, after, limit]

        def work(connection: sqlite3.Connection) -> list[FinishedRollout]:
            rows = connection.execute(f"{_FEED} WHERE {where} ORDER BY position LIMIT ?", values)
            return [
                FinishedRollout(position, revision, Cause(cause), session_from(session))
                for position, revision, cause, *session in rows
            ]

        return await self._database.read(work)

    async def feed_state(self, tenant: str = "", after: int | None = None) -> FeedState:
        """See `Store.feed_state`."""

        def work(connection: sqlite3.Connection) -> FeedState:
            end = connection.execute("SELECT last FROM feed_state").fetchone()[0]
            if after is None:
                return FeedState(end)
            query = "SELECT count(*), coalesce(min(position), 0) FROM feed WHERE tenant = ? AND position > ?"
            return FeedState(end, *connection.execute(query, (tenant, after)).fetchone())

        return await self._database.read(work)

    async def put(
        self, space: str, name: str, value: bytes, *, keep_s: float | None = None, before: Before = ...
    ) -> bool:
        """See `Store.put`."""
        now, most = time.time(), self.limits.bytes_of(space)
        wanted = await pack_value(before) if isinstance(before, bytes) else before
        row = Kept(space, name, inf if keep_s is None else now + keep_s, await pack_value(value))
        return await self._database.write(
            lambda connection: put(connection, row, now, most, wanted), size=len(row.value)
        )

    async def get(self, space: str, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """See `Store.get`."""
        query, now = "SELECT name, value FROM kept WHERE space = ? AND expires > ?", time.time()

        def work(connection: sqlite3.Connection) -> dict[str, bytes]:
            found = dict(connection.execute(query, (space, now))) if names is None else {}
            for chunk in in_chunks(names or ()):
                one_of = f"{query} AND name IN ({question_marks(chunk)})"
                found.update(connection.execute(one_of, (space, now, *chunk)))
            return {name: unpack_value(value) for name, value in found.items()}

        return await self._database.read(work)

    async def take(self, space: str, name: str) -> bytes | None:
        """See `Store.take`."""
        now = time.time()
        value = await self._database.write(lambda connection: take(connection, space, name, now))
        return None if value is None else unpack_value(value)

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now = time.time()
        was_set = self._clock.was_set(now)

        def work(connection: sqlite3.Connection) -> float:
            for (space,) in connection.execute("SELECT space FROM kept_bytes").fetchall():
                drop_expired(connection, space, now)
            return steady_since(connection, self._clock, now, was_set)

        steady = await self._database.write(work)
        return await self._evict(None, self._clock.oldest(now, steady))

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        query = "SELECT (SELECT count(*) FROM sessions), turns, size FROM totals"
        return await self._database.read(lambda connection: Usage(*connection.execute(query).fetchone()))

    async def _keep_limits(self, size: int, own: str) -> Evicted:
        return await self._evict(own) if size > self.limits.max_bytes else Evicted()

    async def _evict(self, own: str | None, oldest: float = 0.0) -> Evicted:
        read = acknowledged_by_all(await self.get(CONSUMERS))

        async def step() -> Evicted:
            now = time.time()
            removed = await self._database.write(
                lambda connection: evict_step(connection, self.limits, own, oldest, now, read),
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


def _find(connection: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Found]:
    groups: dict[bytes, dict[bytes, list[int | str]]] = {}
    for chunk in in_chunks(keys):
        marks = question_marks(chunk)
        query = f"""
            SELECT key, ids, count(*), max(turn), 0 FROM entries WHERE key IN ({marks}) GROUP BY key, ids
            UNION ALL SELECT key, ids, 0, '', 1 FROM evicted WHERE key IN ({marks})
        """
        for key, ids, count, newest, evicted in connection.execute(query, [*chunk, *chunk]):
            group = groups.setdefault(key, {}).setdefault(ids, [0, "", 0])
            groups[key][ids] = [group[0] + count, newest or group[1], group[2] + evicted]
    found = {}
    for key, of_key in groups.items():
        newest_first = heapq.nlargest(FOUND_AT_MOST, of_key.items(), key=lambda item: str(item[1][1]))
        listed = []
        for ids, (count, _, evicted) in newest_first:
            rows = connection.execute(_CANDIDATES, (key, ids)) if count else ()
            candidates = [Candidate(*row) for row in rows] + [Candidate("", "")] * int(evicted)
            listed.append(CandidateGroup(ids, int(count) + int(evicted), candidates[:FOUND_AT_MOST]))
        found[key] = Found(sum(int(count) + int(evicted) for count, _, evicted in of_key.values()), listed)
    return found


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
