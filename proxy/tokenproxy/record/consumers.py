"""The consumers of the feed: values of the store that tell how far each has read.

A consumer that neither reads nor acknowledges for as long as rollouts are kept is forgotten.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tokenproxy.record.store import Store

CONSUMERS = "consumers"
"""Their space in a store; a name is `TENANT/NAME`, and a value an `Acknowledged` as MessagePack."""


class Acknowledged(NamedTuple):
    """How far a consumer has read."""

    position: int
    """It has everything up to here; 0 for nothing."""
    at: float
    """When it was last written, in seconds since the epoch."""


class Consumer(NamedTuple):
    """A consumer of the feed, and what it has not acknowledged."""

    tenant: str
    name: str
    position: int
    """As `Acknowledged.position`."""
    waiting: int
    """Rollouts after that position."""
    oldest: int
    """The position of the first of them; 0 if none waits."""


_decode = msgspec.msgpack.Decoder(Acknowledged).decode


async def acknowledged(store: Store, tenant: str, consumer: str) -> Acknowledged | None:
    """How far a consumer has read; None if it is not known. Raises StoreError."""
    name = f"{tenant}/{consumer}"
    value = (await store.get(CONSUMERS, [name])).get(name)
    return None if value is None else _decode(value)


async def acknowledge(store: Store, tenant: str, consumer: str, position: int) -> int:
    """Note that a consumer has everything up to a position. It becomes known with its first call.

    A position beyond the end counts as the end. A position before the acknowledged one changes nothing.

    Returns:
        the position that is acknowledged now.

    Raises:
        StoreError: the store does not respond.
    """
    name, end = f"{tenant}/{consumer}", (await store.feed(2**62, limit=0, tenant=tenant)).end
    while True:
        value = (await store.get(CONSUMERS, [name])).get(name)
        before = _decode(value).position if value is not None else 0
        now = Acknowledged(max(before, min(position, end)), time.time())
        new = msgspec.msgpack.encode(now)
        if await store.put(CONSUMERS, name, new, keep_s=store.limits.max_age_s, before=value):
            return now.position


async def forget(store: Store, tenant: str, consumer: str) -> bool:
    """Remove a consumer. False if it is not known. Raises StoreError."""
    return await store.take(CONSUMERS, f"{tenant}/{consumer}") is not None


async def consumers(store: Store, tenant: str | None = None) -> list[Consumer]:
    """The consumers of a tenant, or of all, in the order of tenants and names. Raises StoreError."""
    found = []
    for name, value in (await store.get(CONSUMERS)).items():
        owner, _, consumer = name.rpartition("/")
        if tenant in (None, owner):
            position = _decode(value).position
            page = await store.feed(position, limit=1, tenant=owner)
            oldest = page.sessions[0].position if page.sessions else 0
            found.append(Consumer(owner, consumer, position, page.waiting, oldest))
    return sorted(found)


def acknowledged_by_all(values: Mapping[str, bytes]) -> dict[str, int]:
    """What all consumers of a tenant have acknowledged, by tenant.

    Args:
        values: of the space `CONSUMERS`.
    """
    read: dict[str, int] = {}
    for name, value in values.items():
        tenant, position = name.rpartition("/")[0], _decode(value).position
        read[tenant] = min(position, read.get(tenant, position))
    return read
