"""A Redis store whose data are split into partitions, each in one slot of a cluster.

A session is in the partition that its id hashes to, with its turns and their index. So a call that names the
session asks one partition. A search for a conversation without a session asks all of them, in one round trip
to each server, and merges what they reply to what one server would.

Nothing is atomic across partitions. What depends on several of them is done in an order that is safe:

- turns are added first, and then equal conversations are looked for in the other partitions: of two that are
  added at the same time, the later one finds the earlier one, and both become ambiguous. An error in between
  makes the caller add them again, which changes nothing but looks again;
- limits of bytes are divided by the number of partitions, and each partition keeps its own.
"""

import asyncio
import dataclasses
import zlib
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

from proxy.history.store import (
    Cursor,
    Evicted,
    Found,
    IndexEntry,
    Limits,
    Session,
    StoredResponse,
    StoreUnusable,
    Usage,
)
from proxy.history.turn import Turn
from proxy.stores import redis_index_scripts as scripts
from proxy.stores.eviction import add_evicted
from proxy.stores.redis import RedisStore
from proxy.stores.redis_feed import Place
from proxy.stores.redis_functions import PREFIX
from proxy.stores.redis_merge import merge_found, turns_in
from proxy.stores.redis_partitions_feed import PartitionedDocuments, PartitionedFeed
from proxy.stores.redis_replies import read_dated_groups
from proxy.stores.redis_servers import Call, RedisServers

T = TypeVar("T")

DEFAULT_PARTITIONS = 16
"""Of a cluster whose URL does not tell."""
SLOTS = 16_384
_REMEMBERED_TURNS = 100_000


def hash_tags(partitions: int) -> list[str]:
    """The hash tags of partitions: their slots are evenly spread over all slots of a cluster.

    Each is the smallest number whose slot is in the middle of one of as many equal parts of the slots.
    """
    wanted = {(2 * number + 1) * SLOTS // (2 * partitions): number for number in range(partitions)}
    tags = [""] * partitions
    candidate = 0
    while wanted:
        tag = str(candidate)
        number = wanted.pop(crc_hqx(tag.encode(), 0) % SLOTS, None)
        if number is not None:
            tags[number] = tag
        candidate += 1
    return tags


class Partitions:
    """The partitions of one store. There are none until it is open."""

    def __init__(self, servers: RedisServers, limits: Limits) -> None:
        self.servers = servers
        self.all: list[RedisStore] = []
        self.prefixes: list[bytes] = []
        self._limits = limits
        self._turns: dict[str, int] = {}
        """The partitions of turns that were seen last."""

    async def open(self) -> None:
        """Find out how many there are, and open them."""
        servers, name = self.servers, PREFIX + b"partitions"
        if await servers.do(servers.client.exists(PREFIX + b"version")):
            raise StoreUnusable(
                f"{servers.name} holds data that are not split into partitions: leave `partitions` out of "
                f"its URL, or name another database"
            )
        wanted = servers.url.partitions
        stored = await servers.do(servers.client.get(name))
        if stored is None:
            await servers.do(servers.client.set(name, wanted or DEFAULT_PARTITIONS, nx=True))
            stored = await servers.do(servers.client.get(name))
        if wanted not in (None, int(stored)):
            raise StoreUnusable(
                f"{servers.name} holds data in {int(stored)} partitions, and its URL tells {wanted}: set "
                f"partitions={int(stored)}, or delete the keys {PREFIX.decode()}*"
            )
        self._make(int(stored))
        await self.each(lambda part: part.open())

    def number_of(self, name: str | bytes) -> int:
        """The partition of what has a name."""
        return zlib.crc32(name.encode() if isinstance(name, str) else name) % len(self.all)

    def of(self, name: str | bytes) -> RedisStore:
        """The partition of a rollout, document, fleet, or key of responses."""
        return self.all[self.number_of(name)]

    async def of_turn(self, turn: str) -> RedisStore | None:
        """The partition of a turn; None if there is no such turn."""
        if turn not in self._turns:
            held = await self.run_each(scripts.HOLDS, turn)
            self.remember((turn,), next((i for i, holds in enumerate(held) if holds), None))
        return self.all[self._turns[turn]] if turn in self._turns else None

    def remember(self, turns: Iterable[str], number: int | None) -> None:
        """Note in which partition turns are."""
        if number is None:
            return
        for turn in turns:
            self._turns[turn] = number
        while len(self._turns) > _REMEMBERED_TURNS:
            del self._turns[next(iter(self._turns))]

    async def run_each(self, script: str, *args: Any) -> list[Any]:
        """The replies of all partitions to a script, in one round trip to each server."""
        return await self.servers.run_each([Call(prefix, script, args) for prefix in self.prefixes])

    async def each(
        self, call: Callable[[RedisStore], Awaitable[T]], parts: Sequence[RedisStore] | None = None
    ) -> list[T]:
        """The results of a call of all partitions, or of some. All are made, also if one of them fails."""
        done = await asyncio.gather(*map(call, parts or self.all), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return [result for result in done if not isinstance(result, BaseException)]

    def _make(self, number: int) -> None:
        limits = dataclasses.replace(
            self._limits,
            max_bytes=self._limits.max_bytes // number,
            response_bytes=self._limits.response_bytes // number,
            document_bytes=self._limits.document_bytes // number,
            evicted_keys=-(-self._limits.evicted_keys // number),
        )
        self.prefixes = [b"%s{%s}:" % (PREFIX, tag.encode()) for tag in hash_tags(number)]
        self.all = [
            RedisStore(self.servers, limits, prefix, Place(i, number), owner=False)
            for i, prefix in enumerate(self.prefixes)
        ]


class PartitionedStore:
    """All partitions together."""

    def __init__(self, servers: RedisServers, limits: Limits) -> None:
        self._servers = servers
        self._parts = Partitions(servers, limits)
        self.feed = PartitionedFeed(self._parts)
        self.documents = PartitionedDocuments(self._parts)

    async def open(self) -> None:
        """See `Store.open`."""
        await self._parts.open()

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._servers.aclose()

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`."""
        number = self._parts.number_of(session.id)
        evicted = await self._parts.all[number].add(session, turns, entries)
        self._parts.remember((turn.id for turn in turns), number)
        keys = dict.fromkeys(entry.key for of_turn in entries for entry in of_turn if entry.ids)
        if keys and not session.explicit and await self._flag_equal(number, session.id, keys):
            await self._servers.run(self._parts.prefixes[number], scripts.FLAG_OWN, session.id)
        return evicted

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """See `Store.find`."""
        if not keys:
            return {}
        prefixes = self._parts.prefixes
        numbers = range(len(prefixes)) if rollout is None else (self._parts.number_of(rollout),)
        calls = [Call(prefixes[number], scripts.FIND, keys) for number in numbers]
        found = [list(read_dated_groups(reply)) for reply in await self._servers.run_each(calls)]
        for number, of_keys in zip(numbers, found, strict=True):
            self._parts.remember(turns_in(of_keys), number)
        return merge_found(keys, found)

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        replies = await self._parts.run_each(scripts.EVICTED, *keys) if keys else []
        return {keys[number] for reply in replies for number in reply}

    async def claim(self, turn: str) -> bool:
        """See `Store.claim`."""
        part = await self._parts.of_turn(turn)
        return part is not None and await part.claim(turn)

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        part = await self._parts.of_turn(turn)
        if part is not None:
            await part.release(turn)

    async def pin(self, rollout: str, until: float) -> None:
        """See `Store.pin`. Without a name, which no rollout has, it tries whether all partitions respond."""
        if rollout:
            await self._parts.of(rollout).pin(rollout, until)
        else:
            await self._parts.each(lambda part: part.pin(rollout, until))

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""
        part = await self._parts.of_turn(turn)
        return [] if part is None else await part.path(turn)

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        number = self._parts.number_of(rollout)
        turns = await self._parts.all[number].turns(rollout)
        self._parts.remember((turn.id for turn in turns), number)
        return turns

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        number = self._parts.number_of(rollout)
        turns = await self._parts.all[number].newest(rollout, limit)
        self._parts.remember(turns, number)
        return turns

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        return await self._parts.of(session.id).save_session(session)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        return await self._parts.of(rollout).session(rollout)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`."""
        found = await self._parts.each(lambda part: part.sessions(limit=limit, tenant=tenant, before=before))
        sessions = [session for of_part in found for session in of_part]
        sessions.sort(key=lambda session: (session.used, session.id.encode()), reverse=True)
        return sessions[:limit]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return await self._parts.of(rollout).delete(rollout)

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """See `Store.set_rewards`."""
        last = await self.feed.last()
        return await self._parts.of(rollout).set_rewards(rollout, rewards, last)

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        return await self._parts.of(rollout).rewards(rollout)

    async def keep_response(self, response: StoredResponse) -> None:
        """See `Store.keep_response`."""
        await self._parts.of(response.key).keep_response(response)

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """See `Store.responses`."""
        return await self._parts.of(key).responses(key)

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""
        return await self._parts.of(response.key).take_response(response)

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        return await self._parts.of(fleet).replica_changes(fleet)

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        await self._parts.of(fleet).change_replica(fleet, url, change)

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        return await self._parts.all[0].secret()

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        return reduce(add_evicted, await self._parts.each(lambda part: part.evict()))

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        usages = await self._parts.each(lambda part: part.usage())
        return Usage(
            sum(usage.rollouts for usage in usages),
            sum(usage.turns for usage in usages),
            sum(usage.size for usage in usages),
        )

    async def _flag_equal(self, number: int, rollout: str, keys: Iterable[bytes]) -> bool:
        """Make rollouts of other partitions ambiguous that hold a turn under one of the keys."""
        others = [prefix for i, prefix in enumerate(self._parts.prefixes) if i != number]
        calls = [Call(prefix, scripts.FLAG_EQUAL, (rollout, *keys)) for prefix in others]
        return any(await self._servers.run_each(calls)) if calls else False
