"""The servers of a Redis store, and how scripts run on them.

A script gets two keys, and computes the names of all that it uses from the first. Nothing is ever stored
under either of the two. That matters in a cluster while it moves the slot of a partition from one server to
another: part of the keys is on each. Then a script would see only some of them, but a command with several
keys that are on neither server is refused (`TRYAGAIN`) until the slot has moved.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from proxy.history.store import RecordRefused, StoreError, StoreStalled, StoreUnusable
from proxy.history.store_time import abandon_if_cancelled
from proxy.stores.redis_cluster_client import ClusterClient
from proxy.stores.redis_urls import RedisUrl

T = TypeVar("T")

_CONNECTIONS = 32
"""To each server."""
_SPARE = 2
"""Times as many connections as calls: a connection may still be closing when the next call begins."""
_TIMEOUT_S = 10.0
_CONNECT_S = 2.0
"""Of a cluster or a master with replicas: a silent server must not hold up the search for a new master."""
_TRIALS = 2
"""How often a call to a cluster or a failed-over master is tried again, with what is known then of its
servers."""
_CREDENTIALS = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
_SENTINEL_S = 0.5
"""Of a sentinel: others are asked after that."""
_FAILURES = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_GUARD = b"moving"


class Call(NamedTuple):
    """One script that is to be run."""

    prefix: bytes
    script: str
    args: Sequence[Any]


class RedisServers:
    """Connections to what a URL names.

    redis-py, when cancelled, closes its connection, and for a server that hangs waits until its timeout. So a
    call that is cancelled is left to that by itself.
    """

    def __init__(self, url: RedisUrl) -> None:
        """Raises ValueError for options that redis-py does not know; the message quotes no password."""
        self.url = url
        self.name = url.name
        try:
            self.client, self._sentinels = _CLIENTS[url.kind](url)
        except (ValueError, TypeError, *_FAILURES):
            # the cause may quote a password
            raise ValueError(
                f"not a Redis URL: {url.name} has options that are not known, or that do not fit"
            ) from None
        # the pools of clusters and sentinels raise an error where one more connection would be needed
        self._calls = asyncio.Semaphore(_CONNECTIONS)

    async def do(self, work: Awaitable[T]) -> T:
        """The result of a call of the client. Raises StoreError."""

        async def limited() -> T:
            async with self._calls:
                return await work

        with self.explained():
            return await abandon_if_cancelled(limited())

    async def run(self, prefix: bytes, script: str, *args: Any) -> Any:
        """The reply of a script. Raises StoreError."""
        keys = (prefix, prefix + _GUARD)

        async def evaluate() -> Any:
            try:
                return await self.client.evalsha(_digest(script), 2, *keys, *args)
            except exceptions.NoScriptError:
                return await self.client.eval(script, 2, *keys, *args)

        return await self.do(evaluate())

    async def run_each(self, calls: Sequence[Call]) -> list[Any]:
        """The replies of several scripts, sent in one round trip to each server. Raises StoreError."""
        if len(calls) == 1:
            return [await self.run(calls[0].prefix, calls[0].script, *calls[0].args)]
        replies = await self._send(calls, cached=True)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            again = await self._send([calls[i] for i in unknown], cached=False)
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        with self.explained():
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    async def get_each(self, names: Sequence[bytes], field: str) -> list[bytes | None]:
        """One field of several hashes, in one round trip; None where it is missing. Raises StoreError."""

        async def execute() -> list[bytes | None]:
            pipeline = self.client.pipeline(transaction=False)
            for name in names:
                pipeline.hget(name, field)
            return await _executed(pipeline, raise_on_error=True)

        return await self.do(execute()) if names else []

    async def aclose(self) -> None:
        """Close all connections."""
        with self.explained():
            if isinstance(self.client, ClusterClient):
                await self.client.close_all()
            else:
                await self.client.aclose()
            for sentinel in self._sentinels:
                await sentinel.aclose()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors as StoreErrors that name the servers and what to do."""
        try:
            yield
        except _FAILURES as failure:
            # that no server of a cluster could be asked has a reason
            cause = failure.__cause__ if isinstance(failure, exceptions.RedisClusterException) else None
            error = cause if isinstance(cause, _FAILURES) else failure
            raise _kind(error)(f"{self.name}: {error}: {_advice(error, self.url)}") from error
        except msgspec.DecodeError as error:
            raise StoreError(f"{self.name} holds what this version cannot read: {error}") from error

    async def _send(self, calls: Sequence[Call], *, cached: bool) -> list[Any]:
        async def execute() -> list[Any]:
            pipeline = self.client.pipeline(transaction=False)
            for prefix, script, args in calls:
                keys = (prefix, prefix + _GUARD)
                if cached:
                    pipeline.execute_command("EVALSHA", _digest(script), 2, *keys, *args)
                else:
                    pipeline.execute_command("EVAL", script, 2, *keys, *args)
            return await _executed(pipeline, raise_on_error=False)

        return await self.do(execute())


async def _executed(pipeline: Any, *, raise_on_error: bool) -> list[Any]:
    try:
        return list(await pipeline.execute(raise_on_error=raise_on_error))
    except AttributeError as error:
        # see `ClusterClient`
        raise exceptions.ConnectionError("the connection was closed") from error


def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _options(url: RedisUrl, **more: Any) -> dict[str, Any]:
    connect_s = _TIMEOUT_S if url.kind == "server" else _CONNECT_S
    times = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": connect_s}
    return {**times, "protocol": 2, **more, **url.options}


def _server(url: RedisUrl) -> tuple[Any, list[Any]]:
    host, port = url.hosts[0]
    options = _options(
        url,
        max_connections=_CONNECTIONS,
        timeout=_TIMEOUT_S,
        host=host,
        port=port,
        # a server may have closed an idle connection; a timeout is not retried
        retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
    )
    connection = options.pop("connection_class", Connection)
    pool: Any = BlockingConnectionPool(connection_class=connection, **options)
    pool.make_connection()
    return Redis.from_pool(pool), []


def _cluster(url: RedisUrl) -> tuple[Any, list[Any]]:
    options = _options(url, max_connections=_SPARE * _CONNECTIONS, retry=Retry(NoBackoff(), _TRIALS))
    options.pop("connection_class", None)
    nodes = [ClusterNode(host, port) for host, port in url.hosts]
    # redis-py would close all connections after some redirections
    cluster = ClusterClient(startup_nodes=nodes, ssl=url.tls, reinitialize_steps=0, **options)
    return cluster, []


def _sentinel(url: RedisUrl) -> tuple[Any, list[Any]]:
    retry = Retry(NoBackoff(), _TRIALS, supported_errors=(exceptions.ConnectionError,))
    options = _options(url, max_connections=_SPARE * _CONNECTIONS, retry=retry)
    options.pop("connection_class", None)
    # the next sentinel is asked instead of one again that does not respond
    once = Retry(NoBackoff(), 0)
    times = {"socket_timeout": _SENTINEL_S, "socket_connect_timeout": _SENTINEL_S, "retry": once}
    make: Any = Sentinel  # its arguments have no types
    sentinel = make(list(url.hosts), sentinel_kwargs={**times, **url.sentinel_options, "ssl": url.tls})
    client = sentinel.master_for(url.service, ssl=url.tls, **options)
    client.connection_pool.make_connection()
    return client, sentinel.sentinels


_CLIENTS = {"server": _server, "cluster": _cluster, "sentinel": _sentinel}


def _kind(error: Exception) -> type[StoreError]:
    if isinstance(error, _CREDENTIALS):
        return StoreUnusable
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return StoreStalled
    if isinstance(error, exceptions.DataError):
        return RecordRefused
    return StoreError


def _advice(error: Exception, url: RedisUrl) -> str:
    if isinstance(error, exceptions.NoPermissionError):
        return "give its user the commands and keys that docs/redis.md lists"
    if isinstance(error, _CREDENTIALS):
        return "check the user and the password in its URL"
    if isinstance(error, exceptions.MovedError | exceptions.ClusterCrossSlotError) and url.kind != "cluster":
        return "it is part of a cluster: its URL begins with redis+cluster://"
    if isinstance(error, exceptions.ClusterDownError | exceptions.ClusterError | exceptions.TryAgainError):
        return "is a server of the cluster down, or is a slot being moved?"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return "is the server running, and can it be reached from here?"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "give the server more memory (maxmemory), or the store a lower limit"
    if isinstance(error, exceptions.RedisClusterException):
        return "is it a cluster (cluster-enabled yes), and are all its slots assigned?"
    return "is it Redis or Valkey, 6.2 or newer?"
