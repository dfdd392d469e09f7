"""Turns to store, and stores to open. Imports little: processes that write start fast."""

import hashlib
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tokenproxy.record.store import Evicted, Limits, Session, Store
from tokenproxy.record.turn import IndexedTurn, IndexEntry, TellingTurn, Turn, new_id, pack_ids
from tokenproxy.store.urls import make_store


def make_turn(rollout: str = "r", **fields: Any) -> Turn:
    """A turn of about 1200 bytes; `fields` are those that matter to a test."""
    usual: dict[str, Any] = {
        "id": new_id(),
        "request": new_id(),
        "created": time.time(),
        "model": "tiny",
        "completion": pack_ids(range(250)),
        "prompt_tokens": 3,
        "source": "rendered",
    }
    return TellingTurn(rollout=rollout, **{**usual, **fields})


def make_session(rollout: str = "r", **fields: Any) -> Session:
    """A session that is created now; `fields` are those that matter to a test."""
    return Session(id=rollout, **{"created": time.time(), **fields})


def digest_of(name: str) -> bytes:
    """16 bytes that serve as a key or as the digest of ids."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def entry(key: str, ids: str = "") -> IndexEntry:
    """An index entry; without `ids` one that only explains."""
    return IndexEntry(digest_of(key), digest_of(ids) if ids else b"")


def bare(turns: Iterable[Turn]) -> list[IndexedTurn]:
    """Turns that nothing finds."""
    return [IndexedTurn(turn) for turn in turns]


async def add(store: Store, turn: Turn, *entries: IndexEntry) -> Evicted:
    """Add one turn, with a session if it has none: one that no client named."""
    return await store.add(make_session(turn.rollout, explicit=False), [IndexedTurn(turn, entries)])


class Usage(NamedTuple):
    """What a store holds."""

    rollouts: int
    turns: int
    size: int


async def usage(store: Store) -> Usage:
    """The sums over all sessions."""
    sessions = await store.sessions(limit=100_000)
    return Usage(len(sessions), sum(each.turns for each in sessions), sum(each.size for each in sessions))


@asynccontextmanager
async def opened(url: str, limits: Limits | None = None) -> AsyncIterator[Store]:
    """A store, open."""
    store = make_store(url, limits or Limits())
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()
