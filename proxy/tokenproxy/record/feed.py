"""The feed: its consumers, and what each process does for it in the background.

Consumers are values of the store that tell how far each has read. One that neither reads nor acknowledges for
as long as rollouts are kept is forgotten together with rollouts of that age, which a clock that is set
does not remove.

In the background, idle rollouts are finished, consumers are reported, and requests that wait for the feed to
grow are woken: they share one poll of the store, which other processes write too.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import LAST_POSITION, Position, Store, Time
from tokenproxy.record.vocabulary import Cause

CONSUMERS = "consumers"
"""Their space in a store; a name is `TENANT/NAME`, and a value an `Acknowledged` as MessagePack."""
MOST_CONSUMERS = 64
"""Of one tenant: their names are in the metrics."""
LONGEST_INTERVAL_S = 30.0
"""Seconds between two searches for idle rollouts, unless a quarter of `finish_after_s` is less."""
STEP = 128
"""Sessions that are read at a time."""
_IDLE = "idle"
"""A space of the store: how far all processes have looked, as the `used` of a session."""
REPORT_S = 10.0
"""Seconds between two reports of the consumers."""
MOST_REPORTED = 200
"""Names of consumers that the metrics show."""
POLL_S = 0.2
"""Seconds from one poll to the next while somebody waits, beyond `SHORTEST_S`."""
SHORTEST_S = 0.02
"""Seconds between two polls if rollouts are finished all the time: each wakes all who wait."""


class Acknowledged(NamedTuple):
    """How far a consumer has read."""

    position: Position
    """It has everything up to here; 0 for nothing."""
    at: Time
    """When it was last written."""


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
_decode_time = msgspec.json.Decoder(Time).decode


async def acknowledged(store: Store, tenant: str, consumer: str) -> Acknowledged | None:
    """How far a consumer has read; None if it is not known, or damaged. Raises StoreError."""
    name = f"{tenant}/{consumer}"
    return _read(store, await store.get(CONSUMERS, [name])).get(name)


def _read(store: Store, values: Mapping[str, bytes]) -> dict[str, Acknowledged]:
    """The consumers that can be read, by their names in the store."""
    read = {name: store.unreadable.read(f"{CONSUMERS} {name}", _decode, values[name]) for name in values}
    return {name: consumer for name, consumer in read.items() if consumer is not None}


async def acknowledge(store: Store, tenant: str, consumer: str, position: int) -> int | None:
    """Note that a consumer has everything up to a position. It becomes known with its first call.

    A position beyond the end counts as the end. A position before the acknowledged one changes nothing.

    Returns:
        the position that is acknowledged now; None for a new consumer of a tenant that has too many.

    Raises:
        StoreError: the store does not respond.
    """
    name, end = f"{tenant}/{consumer}", (await store.feed(LAST_POSITION, limit=0, tenant=tenant)).end
    while True:
        values = await store.get(CONSUMERS, [name])
        before = _read(store, values).get(name, Acknowledged(0, 0.0))
        now = Acknowledged(max(before.position, min(position, end)), time.time())
        new = msgspec.msgpack.encode(now)
        if await store.put(CONSUMERS, name, new, before=values.get(name), most=MOST_CONSUMERS):
            return now.position
        if not values and not await store.get(CONSUMERS, [name]):
            return None


async def forget(store: Store, tenant: str, consumer: str) -> bool:
    """Remove a consumer. False if it is not known. Raises StoreError."""
    return await store.put(CONSUMERS, f"{tenant}/{consumer}", None)


async def forget_silent(store: Store, before: float) -> None:
    """Remove the consumers that neither read nor acknowledged since a time. Raises StoreError."""
    values = await store.get(CONSUMERS)
    for name, consumer in _read(store, values).items():
        if consumer.at < before:
            await store.put(CONSUMERS, name, None, before=values[name])


async def consumers(store: Store, tenant: str | None = None) -> list[Consumer]:
    """The consumers of a tenant, or of all, in the order of tenants and names. Raises StoreError."""
    found = []
    for name, (position, _) in _read(store, await store.get(CONSUMERS)).items():
        owner, _, consumer = name.rpartition("/")
        if tenant in (None, owner):
            page = await store.feed(position, limit=1, tenant=owner)
            oldest = page.sessions[0].position if page.sessions else 0
            found.append(Consumer(owner, consumer, position, page.waiting, oldest))
    return sorted(found)


async def acknowledged_by_all(store: Store) -> dict[str, int]:
    """What all consumers of a tenant have acknowledged, by tenant. Raises StoreError."""
    read: dict[str, int] = {}
    for name, (position, _) in _read(store, await store.get(CONSUMERS)).items():
        tenant = name.rpartition("/")[0]
        read[tenant] = min(position, read.get(tenant, position))
    return read


class IdleTime:
    """Tells which rollouts are idle, also where a clock was ahead when they were used.

    `used` ascends, so what was the newest some time ago, and all before it, was not used since.
    """

    def __init__(self, after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`after_s`: seconds without use; `clock` is not set by anybody."""
        self.interval_s = min(LONGEST_INTERVAL_S, after_s / 4)
        self._after_s = after_s
        self._clock = clock
        self._newest: deque[tuple[float, float]] = deque()
        """When a search was made, and the newest `used` then."""

    def before(self, newest: float) -> float:
        """Rollouts with a smaller `used` are idle.

        Args:
            newest: the greatest `used` now.
        """
        now, idle = self._clock(), time.time() - self._after_s
        self._newest.append((now, newest))
        while self._newest[0][0] <= now - self._after_s:
            idle = max(idle, math.nextafter(self._newest.popleft()[1], math.inf))
        return idle


async def finish_idle_later(store: Store, idle: IdleTime) -> None:
    """Finish the rollouts that are idle after a while. Raises StoreError."""
    await asyncio.sleep(idle.interval_s)
    if newest := await store.sessions(limit=1):
        await finish_idle(store, idle.before(newest[0].used))


async def finish_idle(store: Store, before: float) -> None:
    """Finish the rollouts last used before a time, in the order of their use.

    Each search begins where the one before stopped, in any process: rollouts that were looked at are
    looked at again only after they are used again. If all that was used later is gone, and with it a time
    that was ahead, all are looked at again.
    """
    stored, newest = (await store.get(_IDLE, [""])).get(""), await store.sessions(limit=1)
    seen = None if stored is None else store.unreadable.read(f"{_IDLE} ", _decode_time, stored)
    if seen is None or (newest and newest[0].used < seen):
        seen = -math.inf
    idle: list[tuple[float, str]] = []
    while page := await store.sessions(limit=STEP, before=before):
        idle += [(session.used, session.id) for session in page if session.used > seen]
        before = page[-1].used
        if before <= seen:
            break
    for _, rollout in reversed(idle):
        await store.finish(rollout, Cause.IDLE)
    if idle:
        await store.put(_IDLE, "", repr(idle[0][0]).encode())


async def report_consumers(store: Store, metrics: Metrics, reported: set[str]) -> None:
    """Report the consumers of all tenants by their names, remove those that are gone, then wait a while.

    Tenants are not told apart: the page of metrics may be open to everybody, and a tenant is the digest of a
    key. Of a name that several tenants use, the rollouts are added up, and the oldest counts.

    Args:
        reported: the names in the metrics, which this changes.

    Raises:
        StoreError: the consumers cannot be read.
    """
    now = time.time()
    waiting: dict[str, int] = {}
    oldest_s: dict[str, float] = {}
    for consumer in await consumers(store):
        if len(waiting) == MOST_REPORTED and consumer.name not in waiting:
            continue
        waiting[consumer.name] = waiting.get(consumer.name, 0) + consumer.waiting
        age = max(0.0, now - consumer.oldest / 1e6) if consumer.waiting else 0.0
        oldest_s[consumer.name] = max(oldest_s.get(consumer.name, 0.0), age)
    for name, count in waiting.items():
        metrics.consumer_lag(name, count, oldest_s[name])
    for name in reported - waiting.keys():
        metrics.consumer_removed(name)
    reported.clear()
    reported.update(waiting)
    await asyncio.sleep(REPORT_S)


class FeedWatch:
    """Polls the end of the feed, as long as somebody waits. One per application."""

    def __init__(self, store: Store, poll_s: float = POLL_S) -> None:
        self._store = store
        self._poll_s = poll_s
        self._waiters: dict[asyncio.Future[None], int] = {}
        """Each with the end of the feed that its request has seen."""
        self._needed = asyncio.Event()
        """Set while somebody waits."""
        self._now = asyncio.Event()
        """Set to poll without waiting for `POLL_S`."""

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the end of the feed is another one than `seen`; False if that takes too long."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[woken] = seen
        self._needed.set()
        try:
            done, _ = await asyncio.wait({woken}, timeout=seconds)
            return bool(done)
        finally:
            del self._waiters[woken]

    def notify(self) -> None:
        """Poll at once: this process may have finished a rollout."""
        self._now.set()

    async def poll(self) -> None:
        """Poll once, as soon as somebody waits, then wait a while.

        Raises:
            StoreError: those who wait are woken by the next poll, or get the error when they read.
        """
        if not self._waiters:
            self._needed.clear()
        await self._needed.wait()
        end = (await self._store.feed(LAST_POSITION, limit=0)).end
        for woken, seen in self._waiters.items():
            if seen != end and not woken.done():
                woken.set_result(None)
        await asyncio.sleep(SHORTEST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._now.wait()
        self._now.clear()
