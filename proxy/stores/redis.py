"""A store in Redis or Valkey (6.2 or newer), for proxies on several machines.

The server must not evict keys by itself (`maxmemory-policy noeviction`): this store keeps its own limits.
Whether the data survive a restart of the server depends on the server's own settings.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.history.store import (
    SECRET_BYTES,
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
from proxy.history.vocabulary import Reason
from proxy.stores import redis_index_scripts, redis_response_scripts, redis_scripts
from proxy.stores.eviction import STEP, AgeClock, evict_in_steps, eviction_target
from proxy.stores.packed import complete_path, fill_prompts, pack_entries, pack_parts, pack_turns, unpack_turn
from proxy.stores.redis_documents import RedisDocuments
from proxy.stores.redis_feed import WHOLE, Place, RedisFeed
from proxy.stores.redis_functions import PREFIX
from proxy.stores.redis_replies import read_found, read_reply, read_session
from proxy.stores.redis_servers import RedisServers

log = logging.getLogger("tokenproxy")

SCHEMA_VERSION = b"2"
_DATED_RESPONSE = msgspec.msgpack.Decoder(tuple[float, StoredResponse])


class RedisStore:
    """One server, or one partition of a store whose data are split."""

    def __init__(
        self,
        servers: RedisServers,
        limits: Limits,
        prefix: bytes = PREFIX,
        place: Place = WHOLE,
        *,
        owner: bool = True,
    ) -> None:
        """A store that is not open yet.

        Args:
            prefix: of the names of all keys. In a cluster it holds a hash tag, so that all are in one slot.
            place: which partition it is.
            owner: whether to close the connections at the end.
        """
        self._limits = limits
        self._servers = servers
        self._name = servers.name
        self._prefix = prefix
        self._place = place
        self._owner = owner
        self._eviction = asyncio.Lock()
        self._clock = AgeClock(limits.max_age_s)
        self.feed = RedisFeed(self._run, prefix, place)
        self.documents = RedisDocuments(self._run, limits)

    async def open(self) -> None:
        """See `Store.open`."""
        version, partitions, memory = await self._run(redis_scripts.OPEN, SCHEMA_VERSION)
        if partitions:
            raise StoreUnusable(
                f"{self._name} holds data in {partitions.decode()} partitions: add "
                f"?partitions={partitions.decode()} to its URL, or name another database"
            )
        if version != SCHEMA_VERSION:
            raise StoreUnusable(
                f"{self._name} has version {version.decode()} of the keys {PREFIX.decode()}*, and this "
                f"program needs version {SCHEMA_VERSION.decode()}: delete these keys or name another database"
            )
        if b"maxmemory_policy:allkeys-" in memory:
            log.warning(
                "%s drops keys by itself when its memory is full, and conversations with them: "
                "set its maxmemory-policy to noeviction",
                self._name,
            )
        self._clock.was_set(await self._server_time())

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        if self._owner:
            await self._servers.aclose()

    async def add(
        self, session: Session, turns: Sequence[Turn], entries: Sequence[Sequence[IndexEntry]]
    ) -> Evicted:
        """See `Store.add`."""
        if not turns:
            return Evicted()
        args: list[Any] = [*_session_arguments(session), repr(time.time())]
        for turn, turn_entries, packed in zip(turns, entries, await pack_turns(turns), strict=True):
            ambiguous = int(turn.reason == Reason.AMBIGUOUS)
            args += turn.id, turn.parent or "", turn.prompt_turn or "", ambiguous
            args += pack_entries(turn_entries), packed
        size = await self._run(redis_scripts.ADD, *args)
        return await self._keep_limits(size, session.id)

    async def find(self, keys: Sequence[bytes], rollout: str | None = None) -> dict[bytes, Found]:
        """See `Store.find`."""
        return read_found(keys, await self._run(redis_index_scripts.FIND, *keys)) if keys else {}

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        if not keys:
            return set()
        found = await self._run(redis_index_scripts.EVICTED, *keys)
        return {keys[number] for number in found}

    async def claim(self, turn: str) -> bool:
        """See `Store.claim`."""
        return bool(await self._run(redis_index_scripts.CLAIM, turn))

    async def release(self, turn: str) -> None:
        """See `Store.release`."""
        await self._run(redis_index_scripts.RELEASE, turn)

    async def pin(self, rollout: str, until: float) -> None:
        """See `Store.pin`."""
        await self._run(redis_scripts.PIN, rollout, repr(time.time()), repr(until))

    async def path(self, turn: str) -> list[Turn]:
        """See `Store.path`."""
        packed = await self._run(redis_scripts.PATH, turn)
        return complete_path(turn, self._unpack_turns(packed))

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        ids = await self._run(redis_scripts.NEWEST, rollout, 0)
        names = [self._prefix + b"turn:" + turn for turn in reversed(ids)]
        packed = await self._servers.get_each(names, "packed")
        turns = self._unpack_turns(each for each in packed if each is not None)
        return fill_prompts(turns.values(), turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        ids = await self._run(redis_scripts.NEWEST, rollout, limit) if limit > 0 else []
        return [turn.decode() for turn in ids]

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        size = await self._run(redis_scripts.SAVE_SESSION, *_session_arguments(session))
        return await self._keep_limits(size, session.id)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        parts = read_reply(await self._run(redis_scripts.SESSION, rollout))
        return next((read_session(each, parts) for each in parts), None)

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`."""
        if limit <= 0:
            return []
        name = self._prefix + (b"used" if tenant is None else b"used:" + tenant.encode())
        place = (repr(before.used), before.id) if before else ("", "")
        parts = read_reply(await self._run(redis_scripts.LIST_SESSIONS, name, limit, *place))
        return [read_session(rollout, parts) for rollout in parts]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return bool(await self._run(redis_scripts.DELETE, rollout))

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float], floor: int = 0) -> bool:
        """See `Store.set_rewards`. `floor`: as `RedisFeed.finish`."""
        args = [arg for turn, reward in rewards.items() for arg in (turn, repr(float(reward)))]
        now = self._place.position(floor)
        return bool(await self._run(redis_scripts.SET_REWARDS, rollout, now, self._place.of, *args))

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        rewards = await self._run(redis_scripts.FIELDS, f"rewards:{rollout}")
        return {turn.decode(): float(reward) for turn, reward in _pairs(rewards)}

    async def keep_response(self, response: StoredResponse) -> None:
        """See `Store.keep_response`."""
        now = time.time()
        packed = msgspec.msgpack.encode((now, response))
        await self._run(
            redis_response_scripts.KEEP_RESPONSE,
            _member(response),
            repr(now),
            packed,
            self._limits.response_bytes,
        )

    async def responses(self, key: bytes) -> list[StoredResponse]:
        """See `Store.responses`."""
        oldest = time.time() - self._limits.response_age_s
        packed = await self._run(redis_scripts.FIELDS, b"responses:" + key)
        with self._servers.explained():
            dated = (_DATED_RESPONSE.decode(each) for _, each in _pairs(packed))
            kept = [response for kept_at, response in dated if kept_at >= oldest]
        return sorted(kept, key=lambda response: response.id, reverse=True)

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""
        return bool(await self._run(redis_response_scripts.TAKE_RESPONSE, _member(response)))

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        changes = await self._run(redis_scripts.FIELDS, f"replicas:{fleet}")
        return {url.decode(): change.decode() for url, change in _pairs(changes)}

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        args = (fleet, url) if change is None else (fleet, url, change)
        await self._run(redis_scripts.CHANGE_REPLICA, *args)

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        secret: bytes = await self._run(redis_scripts.SECRET, secrets.token_bytes(SECRET_BYTES))
        return secret

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        oldest_response = repr(time.time() - self._limits.response_age_s)
        while await self._run(redis_response_scripts.DROP_OLD_RESPONSES, oldest_response, STEP) == STEP:
            pass
        await self.documents.drop_old()
        # the server's clock: the proxies' may differ
        now = await self._server_time()
        clock = self._clock
        args = (repr(now), int(clock.was_set(now)), clock.tolerance_s, clock.longest_gap_s)
        steady_since = float(await self._run(redis_scripts.STEADY_SINCE, *args))
        oldest = clock.oldest(now, steady_since)
        await self.feed.forget_consumers(oldest)
        return await self._evict("", oldest)

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        return Usage(*map(int, await self._run(redis_scripts.USAGE)))

    async def _server_time(self) -> float:
        seconds, microseconds = await self._run(redis_scripts.TIME)
        return int(seconds) + int(microseconds) / 1e6

    async def _keep_limits(self, size: int, own: str) -> Evicted:
        return await self._evict(own) if size > self._limits.max_bytes else Evicted()

    async def _evict(self, own: str, oldest: float = 0.0) -> Evicted:
        limits = self._limits
        sizes = (eviction_target(limits), limits.max_bytes)

        async def step() -> Evicted:
            args = (own, *sizes, repr(oldest), repr(time.time()), limits.evicted_keys, STEP)
            return Evicted(*await self._run(redis_scripts.EVICT, *args))

        return await evict_in_steps(self._eviction, step)

    def _unpack_turns(self, packed: Iterable[bytes]) -> dict[str, Turn]:
        with self._servers.explained():
            turns = [unpack_turn(each) for each in packed]
        return {turn.id: turn for turn in turns}

    async def _run(self, script: str, *args: Any) -> Any:
        return await self._servers.run(self._prefix, script, *args)


def _member(response: StoredResponse) -> bytes:
    return pack_parts((response.id.encode(), response.key))


def _session_arguments(session: Session) -> tuple[str | bytes | int, ...]:
    """What scripts take to create or describe a session."""
    times = (repr(session.created), repr(session.used))
    description = (session.defaults, session.overrides, session.metadata)
    return (session.id, session.tenant, int(session.explicit), *times, *description)


def _pairs(replies: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(replies[::2], replies[1::2], strict=True)
