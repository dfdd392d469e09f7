"""Counts the refused requests of named sessions, for whoever asks why nothing was recorded.

The counts are in the store, because another process may be asked. Requests that are refused at the same time
may be counted as one.
"""

import msgspec

from tokenproxy.record.store import Store, StoreError

_SPACE = "refusals"
_KEEP_S = 86_400.0
_KINDS = 16
"""Different refusals that are counted for a session."""
_CHARACTERS = 200
_decode = msgspec.json.Decoder(dict[str, int]).decode

Refusals = dict[str, int]
"""How many requests were refused, by status and the beginning of the message."""


async def read_refusals(store: Store, rollout: str) -> Refusals:
    """The refusals of a rollout within a day of each other. Raises StoreError."""
    held = (await store.get(_SPACE, [rollout])).get(rollout)
    return (held and store.unreadable.read(f"{_SPACE} {rollout}", _decode, held)) or {}


async def count_refusal(store: Store, rollout: str, status: int, message: str) -> None:
    """Count a refused request; without a rollout, or while the store does not respond, do nothing."""
    if not rollout:
        return
    try:
        refusals = await read_refusals(store, rollout)
        kind = f"{status} {message}"[:_CHARACTERS]
        if kind in refusals or len(refusals) < _KINDS:
            refusals[kind] = refusals.get(kind, 0) + 1
            await store.put(_SPACE, rollout, msgspec.json.encode(refusals), keep_s=_KEEP_S)
    except StoreError:
        return  # the store's own failures are logged, and a request is refused all the same
