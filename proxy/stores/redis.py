"""A store in Redis or Valkey (6.2 or newer), for proxies on several machines.

The server must not evict keys by itself (`maxmemory-policy noeviction`): this store keeps its own limits.
Whether the data survive a restart of the server depends on the server's own settings.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from proxy.history.store import (
    SECRET_BYTES,
    Candidate,
    CandidateGroup,
    Cursor,
    Evicted,
    Found,
    IndexEntry,
    Limits,
    RecordRefused,
    Session,
    StoredResponse,
    StoreError,
    StoreStalled,
    StoreUnusable,
    Usage,
)
from proxy.history.store_time import abandon_if_cancelled
from proxy.history.turn import Turn
from proxy.history.vocabulary import Reason
from proxy.stores import redis_index_scripts, redis_response_scripts, redis_scripts
from proxy.stores.eviction import STEP, AgeClock, evict_in_steps, eviction_target
from proxy.stores.packed import complete_path, fill_prompts, pack_entries, pack_parts, pack_turns, unpack_turn
from proxy.stores.redis_documents import RedisDocuments
from proxy.stores.redis_feed import RedisFeed, microseconds
from proxy.stores.redis_functions import PREFIX
from proxy.stores.redis_replies import read_reply, read_session, session_from

SCHEMA_VERSION = b"2"
_CONNECTIONS = 32
_TIMEOUT_S = 10.0
_CREDENTIALS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_DATED_RESPONSE = msgspec.msgpack.Decoder(tuple[float, StoredResponse])


class RedisStore:
    """One server. `url` is what redis-py takes: `redis://`, `rediss://`, options after `?`.

    redis-py, when cancelled, closes its connection, and for a server that hangs waits until its timeout. So a
    call that is cancelled is left to that by itself.
    """

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
                # a server may have closed an idle connection; a timeout is not retried
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
        self._eviction = asyncio.Lock()
        self._clock = AgeClock(limits.max_age_s)
        self._redis: Any = Redis.from_pool(pool)
        self.feed = RedisFeed(self._run)
        self.documents = RedisDocuments(self._run, limits)

    async def open(self) -> None:
        """See `Store.open`."""
        with self._explained():
            await abandon_if_cancelled(self._redis.set(PREFIX + b"version", SCHEMA_VERSION, nx=True))
            version = await abandon_if_cancelled(self._redis.get(PREFIX + b"version"))
        if version != SCHEMA_VERSION:
            raise StoreUnusable(
                f"{self._name} has version {version.decode()} of the keys {PREFIX.decode()}*, and this "
                f"program needs version {SCHEMA_VERSION.decode()}: delete these keys or name another database"
            )
        self._clock.was_set(await self._server_time())

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        with self._explained():
            await self._redis.aclose()

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

    async def find(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        """See `Store.find`."""
        if not keys:
            return {}
        parts = read_reply(await self._run(redis_index_scripts.FIND, *keys))
        return {keys[int(number)]: _read_found(parts) for number in parts}

    async def evicted(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Store.evicted`."""
        if not keys:
            return set()
        with self._explained():
            scores = await abandon_if_cancelled(self._redis.zmscore(PREFIX + b"evicted", list(keys)))
        return {key for key, score in zip(keys, scores, strict=True) if score is not None}

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
        with self._explained():
            ids = await abandon_if_cancelled(self._redis.zrange(_name("turns", rollout), 0, -1))
            async with self._redis.pipeline(transaction=False) as pipeline:
                for turn in ids:
                    pipeline.hget(PREFIX + b"turn:" + turn, "packed")
                packed = await abandon_if_cancelled(pipeline.execute())
        turns = self._unpack_turns(each for each in packed if each is not None)
        return fill_prompts(turns.values(), turns)

    async def newest(self, rollout: str, limit: int) -> list[str]:
        """See `Store.newest`."""
        if limit <= 0:
            return []
        with self._explained():
            ids = await abandon_if_cancelled(self._redis.zrevrange(_name("turns", rollout), 0, limit - 1))
        return [turn.decode() for turn in ids]

    async def save_session(self, session: Session) -> Evicted:
        """See `Store.save_session`."""
        size = await self._run(redis_scripts.SAVE_SESSION, *_session_arguments(session))
        return await self._keep_limits(size, session.id)

    async def session(self, rollout: str) -> Session | None:
        """See `Store.session`."""
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hgetall(_name("rollout", rollout))
                pipeline.zscore(PREFIX + b"used", rollout)
                fields, used = await abandon_if_cancelled(pipeline.execute())
        return session_from(rollout, used, fields) if fields else None

    async def sessions(
        self, *, limit: int, tenant: str | None = None, before: Cursor | None = None
    ) -> list[Session]:
        """See `Store.sessions`."""
        if limit <= 0:
            return []
        name = PREFIX + b"used" if tenant is None else _name("used", tenant)
        place = (repr(before.used), before.id) if before else ("", "")
        parts = read_reply(await self._run(redis_scripts.LIST_SESSIONS, name, limit, *place))
        return [read_session(rollout, parts) for rollout in parts]

    async def delete(self, rollout: str) -> bool:
        """See `Store.delete`."""
        return bool(await self._run(redis_scripts.DELETE, rollout))

    async def set_rewards(self, rollout: str, rewards: Mapping[str, float]) -> bool:
        """See `Store.set_rewards`."""
        args = [arg for turn, reward in rewards.items() for arg in (turn, repr(float(reward)))]
        return bool(await self._run(redis_scripts.SET_REWARDS, rollout, microseconds(), *args))

    async def rewards(self, rollout: str) -> dict[str, float]:
        """See `Store.rewards`."""
        with self._explained():
            rewards = await abandon_if_cancelled(self._redis.hgetall(_name("rewards", rollout)))
        return {turn.decode(): float(reward) for turn, reward in rewards.items()}

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
        with self._explained():
            packed = await abandon_if_cancelled(self._redis.hvals(PREFIX + b"responses:" + key))
            dated = map(_DATED_RESPONSE.decode, packed)
            kept = [response for kept_at, response in dated if kept_at >= oldest]
        return sorted(kept, key=lambda response: response.id, reverse=True)

    async def take_response(self, response: StoredResponse) -> bool:
        """See `Store.take_response`."""
        return bool(await self._run(redis_response_scripts.TAKE_RESPONSE, _member(response)))

    async def replica_changes(self, fleet: str) -> dict[str, str]:
        """See `Store.replica_changes`."""
        with self._explained():
            changes = await abandon_if_cancelled(self._redis.hgetall(_name("replicas", fleet)))
        return {url.decode(): change.decode() for url, change in changes.items()}

    async def change_replica(self, fleet: str, url: str, change: str | None) -> None:
        """See `Store.change_replica`."""
        name = _name("replicas", fleet)
        with self._explained():
            if change is None:
                await abandon_if_cancelled(self._redis.hdel(name, url))
            else:
                await abandon_if_cancelled(self._redis.hset(name, url, change))

    async def secret(self) -> bytes:
        """See `Store.secret`."""
        name, new = PREFIX + b"secret", secrets.token_bytes(SECRET_BYTES)
        with self._explained():
            await abandon_if_cancelled(self._redis.set(name, new, nx=True))
            secret: bytes = await abandon_if_cancelled(self._redis.get(name))
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
        with self._explained():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.zcard(PREFIX + b"used")
                pipeline.hmget(PREFIX + b"totals", "turns", "size")
                rollouts, (turns, size) = await abandon_if_cancelled(pipeline.execute())
        return Usage(rollouts, int(turns or 0), int(size or 0))

    async def _server_time(self) -> float:
        with self._explained():
            seconds, microseconds = await abandon_if_cancelled(self._redis.time())
        return float(seconds + microseconds / 1e6)

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
        with self._explained():
            turns = [unpack_turn(each) for each in packed]
        return {turn.id: turn for turn in turns}

    async def _run(self, script: str, *args: Any) -> Any:
        with self._explained():
            try:
                digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
                return await abandon_if_cancelled(self._redis.evalsha(digest, 1, PREFIX, *args))
            except exceptions.NoScriptError:
                return await abandon_if_cancelled(self._redis.eval(script, 1, PREFIX, *args))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors as StoreErrors that name the server and what to do."""
        try:
            yield
        except (exceptions.RedisError, OSError) as error:
            raise _kind(error)(f"{self._name}: {error}: {_advice(error)}") from error
        except msgspec.DecodeError as error:
            raise StoreError(f"{self._name} holds what this version cannot read: {error}") from error


def _name(kind: str, name: str) -> bytes:
    return b"%s%s:%s" % (PREFIX, kind.encode(), name.encode())


def _member(response: StoredResponse) -> bytes:
    return pack_parts((response.id.encode(), response.key))


def _read_found(parts: Iterator[bytes]) -> Found:
    total, groups = int(next(parts)), int(next(parts))
    return Found(total, [_read_group(parts) for _ in range(groups)])


def _read_group(parts: Iterator[bytes]) -> CandidateGroup:
    ids, total, candidates = next(parts), int(next(parts)), int(next(parts))
    return CandidateGroup(ids, total, [_read_candidate(parts) for _ in range(candidates)])


def _read_candidate(parts: Iterator[bytes]) -> Candidate:
    return Candidate(next(parts).decode(), next(parts).decode(), next(parts) == b"1")


def _session_arguments(session: Session) -> tuple[str | bytes | int, ...]:
    """What scripts take to create or describe a session."""
    times = (repr(session.created), repr(session.used))
    description = (session.defaults, session.overrides, session.metadata)
    return (session.id, session.tenant, int(session.explicit), *times, *description)


def _kind(error: Exception) -> type[StoreError]:
    if isinstance(error, _CREDENTIALS):
        return StoreUnusable
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return StoreStalled
    if isinstance(error, exceptions.DataError):
        return RecordRefused
    return StoreError


def _advice(error: Exception) -> str:
    if isinstance(error, _CREDENTIALS):
        return "check the user and the password in its URL"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return "is the server running, and can it be reached from here?"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "give the server more memory (maxmemory), or the store a lower limit"
    return "is it Redis or Valkey, 6.2 or newer, and not a cluster?"
