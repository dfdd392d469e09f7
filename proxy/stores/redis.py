"""A store in Redis or Valkey (6.2 or newer), for proxies on several machines.

The server must not drop keys by itself (`maxmemory-policy noeviction`): this store keeps its own limits. What
outlives the server is a matter of the server's own settings.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from proxy.history.store import FOUND_AT_MOST, Evicted, Limits, Session, StoredResponse, StoreError, Usage
from proxy.history.turn import Turn, made_up
from proxy.stores import redis_scripts
from proxy.stores.packed import goal, pack_keys, pack_turn, together, unpack_turn
from proxy.stores.room import Room, repeat

PREFIX = b"tokenproxy:"
SCHEMA_VERSION = b"1"
_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_BATCH = 256
"""Turns that leave in one step of the server, which does nothing else meanwhile."""
_DATED_ANSWER = msgspec.msgpack.Decoder(tuple[float, StoredResponse])


class RedisStore:
    """One server. `url` is what redis-py takes: `redis://`, `rediss://`, options after `?`."""

    def __init__(self, url: str, limits: Limits) -> None:
        self._limits = limits
        try:
            pool: Any = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=_TIMEOUT_S,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                protocol=2,
                # a server may have closed a connection that was idle; a late answer is no such case
                retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
            )
            pool.make_connection()
        except (ValueError, TypeError):
            # the cause may quote a password
            raise ValueError(
                "not a Redis URL; it looks like redis://user:password@host:6379/0, special characters as %XX"
            ) from None
        at = pool.connection_kwargs
        scheme = url.partition(":")[0]
        self._name = f"{scheme}://{at.get('host', 'localhost')}:{at.get('port', 6379)}/{at.get('db', 0)}"
        self._room = Room()
        self._redis: Any = Redis.from_pool(pool)

    async def open(self) -> None:
        """See `Store.open`."""
        with self._explained():
            await self._redis.set(PREFIX + b"version", SCHEMA_VERSION, nx=True)
            version = await self._redis.get(PREFIX + b"version")
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{self._name} has version {version.decode()} of the keys {PREFIX.decode()}*, and this "
                f"program knows {SCHEMA_VERSION.decode()}: name another database, or delete those keys"
            )

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        with self._explained():
            await self._redis.aclose()

    async def add(self, turns: Sequence[Turn], keys: Sequence[Sequence[bytes]]) -> Evicted:
        """See `Store.add`."""
        if not turns:
            return Evicted()
        args: list[Any] = [turns[0].rollout, repr(time.time())]
        for turn, of_turn in zip(turns, keys, strict=True):
            packed, packed_keys = pack_turn(turn), pack_keys(of_turn)
            args += turn.id, turn.parent or "", packed_keys, packed, len(packed) + len(packed_keys)
        size = await self._run(redis_scripts.ADD, *args)
        return await self._shrink(turns[0].rollout) if size > self._limits.max_bytes else Evicted()

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """See `Store.find`."""
        with self._explained():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.zrevrange(PREFIX + b"key:" + key, 0, FOUND_AT_MOST - 1)
                found = await pipeline.execute()
        return {key: [turn.decode() for turn in ids] for key, ids in zip(keys, found, strict=True) if ids}

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        if not keys:
            return set()
        with self._explained():
            scores = await self._redis.zmscore(PREFIX + b"evicted", list(keys))
        return {key for key, score in zip(keys, scores, strict=True) if score is not None}

    async def path(self, turn_id: str) -> list[Turn]:
        """See `Store.path`."""
        found = await self._run(redis_scripts.PATH, turn_id)
        with self._explained():
            return [unpack_turn(packed) for packed in reversed(found)]

    async def turns(self, rollout: str) -> list[Turn]:
        """See `Store.turns`."""
        with self._explained():
            ids = await self._redis.zrange(_name("turns", rollout), 0, -1)
            async with self._redis.pipeline(transaction=False) as pipeline:
                for turn_id in ids:
                    pipeline.hget(PREFIX + b"turn:" + turn_id, "packed")
                found = await pipeline.execute()
            return [unpack_turn(packed) for packed in found if packed is not None]

    async def save_session(self, session: Session) -> None:
        """See `Store.save_session`."""
        fields: dict[str, str | int | bytes] = {
            "explicit": int(session.explicit),
            "created": repr(session.created),
            "defaults": session.defaults,
            "overrides": session.overrides,
            "metadata": session.metadata,
        }
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hset(_name("rollout", session.id), mapping=fields)
                pipeline.zadd(PREFIX + b"used", {session.id: session.used})
                await pipeline.execute()

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hgetall(_name("rollout", rollout))
                pipeline.zscore(PREFIX + b"used", rollout)
                fields, used = await pipeline.execute()
        return _session(rollout, used, fields) if fields else None

    async def sessions(self, *, limit: int, before: float | None = None) -> list[Session]:
        """See `Store.sessions`."""
        highest = "+inf" if before is None else f"({before!r}"
        with self._explained():
            found = await self._redis.zrevrangebyscore(
                PREFIX + b"used", highest, "-inf", start=0, num=limit, withscores=True
            )
            async with self._redis.pipeline(transaction=False) as pipeline:
                for rollout, _ in found:
                    pipeline.hgetall(PREFIX + b"rollout:" + rollout)
                described = await pipeline.execute()
        return [
            _session(rollout.decode(), used, fields)
            for (rollout, used), fields in zip(found, described, strict=True)
            if fields
        ]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return bool(await self._run(redis_scripts.DELETE, rollout))

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> None:
        """See `Store.set_rewards`."""
        name, now = _name("rollout", rollout), time.time()
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hsetnx(name, "explicit", int(not made_up(rollout)))
                pipeline.hsetnx(name, "created", repr(now))
                pipeline.zadd(PREFIX + b"used", {rollout: now}, nx=True)
                for turn, reward in rewards.items():
                    pipeline.hset(_name("rewards", rollout), turn, repr(float(reward)))
                await pipeline.execute()

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        with self._explained():
            found = await self._redis.hgetall(_name("rewards", rollout))
        return {turn.decode(): float(reward) for turn, reward in found.items()}

    async def keep_response(self, answer: StoredResponse) -> None:
        """See `Store.keep_response`."""
        now = time.time()
        packed = msgspec.msgpack.encode((now, answer))
        await self._run(
            redis_scripts.ADD_ANSWER, _member(answer), repr(now), packed, self._limits.answer_bytes
        )

    async def answers(self, key: bytes) -> list[StoredResponse]:
        """See `Store.answers`."""
        oldest = time.time() - self._limits.answer_age_s
        with self._explained():
            found = await self._redis.hvals(PREFIX + b"answers:" + key)
            dated = [_DATED_ANSWER.decode(packed) for packed in found]
        kept = [answer for since, answer in dated if since >= oldest]
        return sorted(kept, key=lambda answer: answer.id, reverse=True)

    async def take_response(self, answer: StoredResponse) -> bool:
        """See `Store.take_response`."""
        return bool(await self._run(redis_scripts.TAKE_ANSWER, _member(answer)))

    async def evict(self) -> Evicted:
        """See `Store.evict`."""
        now = time.time()
        old_answers = (redis_scripts.AGE_ANSWERS, repr(now - self._limits.answer_age_s), _BATCH)
        while await self._run(*old_answers) == _BATCH:
            pass
        aged = (redis_scripts.AGE, repr(now - self._limits.max_age_s), self._limits.evicted_keys, _BATCH)
        old = await repeat(lambda: self._evict_some(*aged))
        usage = await self.usage()
        return together(old, await self._shrink("") if usage.size > self._limits.max_bytes else Evicted())

    async def usage(self) -> Usage:
        """See `Store.usage`."""
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.zcard(PREFIX + b"used")
                pipeline.hmget(PREFIX + b"totals", "turns", "size")
                rollouts, (turns, size) = await pipeline.execute()
        return Usage(rollouts, int(turns or 0), int(size or 0))

    async def _shrink(self, keep: str) -> Evicted:
        limits = self._limits
        args = (keep, goal(limits), limits.max_bytes, limits.evicted_keys, _BATCH)
        return await self._room.make(lambda: self._evict_some(redis_scripts.SHRINK, *args))

    async def _evict_some(self, script: str, *args: Any) -> Evicted:
        return Evicted(*await self._run(script, *args))

    async def _run(self, script: str, *args: Any) -> Any:
        with self._explained():
            try:
                digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
                return await self._redis.evalsha(digest, 1, PREFIX, *args)
            except exceptions.NoScriptError:
                return await self._redis.eval(script, 1, PREFIX, *args)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors as StoreErrors that name the server and what to do."""
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            raise StoreError(f"{self._name}: {error}: {_advice(error)}") from error
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._name} holds what this version cannot read: {error}") from error


def _name(kind: str, name: str) -> bytes:
    return b"%s%s:%s" % (PREFIX, kind.encode(), name.encode())


def _member(answer: StoredResponse) -> bytes:
    return pack_keys((answer.id.encode(), answer.key))


def _session(rollout: str, used: float, fields: dict[bytes, bytes]) -> Session:
    """Only what somebody described has all fields."""
    return Session(
        id=rollout,
        explicit=fields[b"explicit"] == b"1",
        created=float(fields[b"created"]),
        used=used,
        turns=int(fields.get(b"turns", 0)),
        size=int(fields.get(b"size", 0)),
        defaults=fields.get(b"defaults", b"{}"),
        overrides=fields.get(b"overrides", b"{}"),
        metadata=fields.get(b"metadata", b"{}"),
    )


def _advice(error: Exception) -> str:
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return "check the user and the password in its URL"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return "is the server running, and can it be reached from here?"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "give the server more memory (maxmemory), or the store a lower limit"
    return "is it Redis or Valkey, 6.2 or newer, and not a cluster?"
