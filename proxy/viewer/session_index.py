"""An in-memory index of a tenant's sessions: stores have no index for what the list filters and sorts by.

There is no background task. Each request updates the index for at most `WORK_S` and returns what it has by
then; the next request continues. With 100,000 sessions the page shows how many were read, and requests again.

Stores list sessions by last use, newest first. So a walk over them ends at the first page without a change.
Every `FULL_WALK_S` a walk covers all sessions, to find those that were deleted or evicted. A reward does not
count as a use: the feed returns the sessions that got one.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from proxy.history.store import Cursor, Session, Store
from proxy.viewer.session_query import Entry, ListQuery, Selection, select
from proxy.viewer.summaries import Summary, summarize, summary_row
from proxy.viewer.tree import stored_json

WORK_S = 0.5
"""How long one request works on the index."""
FULL_WALK_S = 30.0
IDLE_S = 600.0
"""Seconds without a request after which an index is dropped."""

_PAGE = 1000
_AT_ONCE = 16
"""Sessions that are read at the same time."""
_BYTES_AT_ONCE = 1 << 20
"""Stored bytes of the sessions that are read at the same time; a larger session is read alone."""
_LARGE_BYTES = 1 << 14
"""Bytes of ids and messages from which a session is summarised in a thread: a summary compares each prompt
with up to 16 earlier ones, and parses messages."""
_SELECTIONS = 4
"""Results that are kept until the index changes."""


class SessionIndex:
    """The sessions of one tenant."""

    def __init__(self, store: Store, tenant: str) -> None:
        """Nothing is read yet."""
        self._store = store
        self._tenant = tenant
        self._entries: dict[str, Entry] = {}
        self._unread: dict[str, None] = {}
        """Ids of sessions whose turns or reward must be read, in the order in which they were found."""
        self._lock = asyncio.Lock()
        self._walk: _Walk | None = None
        self._walked_at: float | None = None
        """When the last walk over all sessions ended, on the clock of `time.monotonic`."""
        self._feed_position: int | None = None
        self._version = 0
        self._selections: dict[tuple[int, ListQuery], Selection] = {}

    async def page(self, query: ListQuery, offset: int, limit: int) -> dict[str, Any]:
        """The sessions of one page, and what is counted over all that match.

        Raises:
            StoreError: the store does not respond; the next request continues.
        """
        deadline = time.monotonic() + WORK_S
        async with self._lock:
            await self._follow_rewards()
            await self._find_changes(deadline)
            selection = await self._select(query)
            shown = selection.entries[offset : offset + limit]
            # the feed does not tell of rewards of sessions that have no turns
            self._unread.update((entry.id, None) for entry in shown if not entry.turns)
            if await self._read(deadline, [entry.id for entry in shown]):
                selection = await self._select(query)
                shown = selection.entries[offset : offset + limit]
            complete = self._walked_at is not None and not self._unread
            return {
                "object": "list",
                "data": [_row(entry) for entry in shown],
                "matching": len(selection.entries),
                "sessions": len(self._entries),
                "read": len(self._entries) - len(self._unread),
                "complete": complete,
                "facets": selection.facets,
                "rewards": selection.rewards,
                "reasons_over_time": selection.reasons_over_time,
            }

    async def _follow_rewards(self) -> None:
        """Read again the sessions that were finished since the last request."""
        feed = self._store.feed
        if self._feed_position is None:
            self._feed_position = await feed.end()
            return
        finished = await feed.read(self._feed_position, limit=_PAGE, tenant=self._tenant)
        for rollout in finished:
            if rollout.session.id in self._entries:
                self._unread[rollout.session.id] = None
            self._feed_position = rollout.position

    async def _find_changes(self, deadline: float) -> None:
        """Walk over the sessions, the last used first, until the deadline or the end of the walk."""
        now = time.monotonic()
        if self._walk is None:
            full = self._walked_at is None or now - self._walked_at >= FULL_WALK_S
            self._walk = _Walk(full=full, started=time.time())
        walk = self._walk
        while True:
            page = await self._store.sessions(limit=_PAGE, tenant=self._tenant, before=walk.before)
            changed = [session for session in page if self._note(session)]
            walk.seen.update(session.id for session in page)
            if walk.full:
                self._unread.update((session.id, None) for session in page if not session.turns)
            if len(page) < _PAGE or not (changed or walk.full):
                self._end_walk(walk)
                return
            walk.before = Cursor(page[-1].used, page[-1].id)
            if time.monotonic() >= deadline:
                return

    def _note(self, session: Session) -> bool:
        """Update the entry of a session. Returns whether it changed."""
        entry, previous = _entry(session), self._entries.get(session.id)
        if previous is not None and previous.created != entry.created:
            previous = None  # that one was deleted
        if previous is not None:
            entry.summary, entry.reward = previous.summary, previous.reward
            if entry == previous:
                return False
        self._entries[session.id] = entry
        if previous is None or (previous.turns, previous.size) != (entry.turns, entry.size):
            self._unread[session.id] = None
        self._version += 1
        return True

    def _end_walk(self, walk: "_Walk") -> None:
        self._walk = None
        if not walk.full:
            return
        self._walked_at = time.monotonic()
        # one that was used during the walk may have moved to a part that was walked already
        unseen = [entry for key, entry in self._entries.items() if key not in walk.seen]
        gone = [entry.id for entry in unseen if entry.used < walk.started]
        for key in gone:
            del self._entries[key]
            self._unread.pop(key, None)
            self._version += 1

    async def _read(self, deadline: float, first: Sequence[str]) -> bool:
        """Read turns and rewards of sessions, some of them first. Returns whether any was read."""
        urgent = [key for key in first if key in self._unread]
        read = False
        while urgent or self._unread:
            batch = self._first_of(urgent or self._unread)
            urgent = urgent[len(batch) :]
            await asyncio.gather(*map(self._read_one, batch))
            read = True
            if time.monotonic() >= deadline:
                break
        return read

    def _first_of(self, keys: Iterable[str]) -> list[str]:
        """The first of these sessions: at most `_AT_ONCE`, of `_BYTES_AT_ONCE` bytes in all, at least one."""
        batch: list[str] = []
        size = 0
        for key in islice(keys, _AT_ONCE):
            size += self._entries[key].size if key in self._entries else 0
            if batch and size > _BYTES_AT_ONCE:
                break
            batch.append(key)
        return batch

    async def _read_one(self, key: str) -> None:
        entry = self._entries.get(key)
        turns = await self._store.turns(key)
        rewards = await self._store.rewards(key)
        found: Summary
        if sum(len(turn.appended) + len(turn.messages) for turn in turns) < _LARGE_BYTES:
            found = summarize(turns)
        else:
            found = await asyncio.to_thread(summarize, turns)
        self._unread.pop(key, None)
        if entry is not None and (entry.summary, entry.reward) != (found, rewards.get("")):
            entry.summary, entry.reward = found, rewards.get("")
            self._version += 1

    async def _select(self, query: ListQuery) -> Selection:
        """The sessions that match, from the last results if nothing changed."""
        key = self._version, query
        found = self._selections.get(key)
        if found is None:
            entries = list(self._entries.values())
            found = await asyncio.to_thread(select, entries, query)
            for old in list(self._selections)[: 1 - _SELECTIONS]:
                del self._selections[old]
            self._selections[key] = found
        return found


class SessionIndexes:
    """The indexes of an application's tenants. An index is dropped after `IDLE_S` without a request."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._indexes: dict[str, SessionIndex] = {}
        self._drops: dict[str, asyncio.TimerHandle] = {}

    def of(self, tenant: str) -> SessionIndex:
        """The index of a tenant, for one request."""
        if tenant in self._drops:
            self._drops.pop(tenant).cancel()
        loop = asyncio.get_running_loop()
        self._drops[tenant] = loop.call_later(IDLE_S, self._drop, tenant)
        return self._indexes.setdefault(tenant, SessionIndex(self._store, tenant))

    def _drop(self, tenant: str) -> None:
        self._indexes.pop(tenant, None)
        self._drops.pop(tenant, None)


class _Walk:
    """A walk over the sessions, which several requests may share."""

    def __init__(self, *, full: bool, started: float) -> None:
        self.full = full
        self.started = started
        """In seconds since the epoch."""
        self.before: Cursor | None = None
        self.seen: set[str] = set()


def _entry(session: Session) -> Entry:
    return Entry(
        id=session.id,
        name=session.name,
        explicit=session.explicit,
        ambiguous=session.ambiguous,
        created=session.created,
        used=session.used,
        turns=session.turns,
        size=session.size,
        metadata=session.metadata,
    )


def _row(entry: Entry) -> dict[str, Any]:
    summary = entry.summary
    return {
        "id": entry.name,
        "explicit": entry.explicit,
        "ambiguous": entry.ambiguous,
        "created": entry.created,
        "used": entry.used,
        "turn_count": entry.turns,
        "bytes": entry.size,
        "metadata": stored_json(entry.metadata, b"{}"),
        "reward": entry.reward,
        "summary": summary_row(summary) if summary is not None else None,
    }
