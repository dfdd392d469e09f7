"""Counts the refused requests of named sessions, for whoever asks why nothing was recorded.

The counts are in the store, because another process may be asked. Of requests that are refused at the same
time some may not be counted.
"""

from contextlib import suppress

import msgspec

from tokenproxy.record.store import Store, StoreError

_SPACE = "refusals"
_KEEP_S = 86_400.0
_CHARACTERS = 200


class Refusals(msgspec.Struct, frozen=True):
    """How many requests of a session were refused, each within a day of the one before."""

    refusals: int = 0
    last_refusal: str = ""
    """Status and beginning of the message."""


_decode = msgspec.json.Decoder(Refusals).decode


async def read_refusals(store: Store, rollout: str) -> Refusals:
    """The refusals of a rollout. Raises StoreError."""
    held = (await store.get(_SPACE, [rollout])).get(rollout, b"{}")
    return store.unreadable.read(f"{_SPACE} {rollout}", _decode, held) or Refusals()


async def count_refusal(store: Store, rollout: str, status: int, message: str) -> None:
    """Count a refused request, if it has a rollout and the store responds."""
    if not rollout:
        return
    with suppress(StoreError):
        before = await read_refusals(store, rollout)
        refusals = Refusals(before.refusals + 1, f"{status} {message}"[:_CHARACTERS])
        await store.put(_SPACE, rollout, msgspec.json.encode(refusals), keep_s=_KEEP_S)
