"""Turns to store, and stores to open. Imports little: processes that write start fast."""

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.history.store import Limits, Store, StoredResponse
from proxy.history.turn import Turn, new_id, pack_ids
from proxy.stores.urls import make_store


def make_turn(rollout: str = "r", **fields: Any) -> Turn:
    """A turn of about 1200 bytes; `fields` say what is special about it."""
    usual: dict[str, Any] = {
        "id": new_id(),
        "request": new_id(),
        "created": time.time(),
        "model": "tiny",
        "completion": pack_ids(range(250)),
        "prompt_tokens": 3,
        "source": "rendered",
    }
    return Turn(rollout=rollout, **{**usual, **fields})


def make_response(key: bytes, **fields: Any) -> StoredResponse:
    return StoredResponse(id=new_id(), key=key, **fields)


def key_of(name: str) -> bytes:
    """A key of 16 bytes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


@asynccontextmanager
async def opened(url: str, limits: Limits | None = None) -> AsyncIterator[Store]:
    """A store, open."""
    store = make_store(url, limits or Limits())
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()
