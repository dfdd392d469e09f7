"""The servers of a Redis store, as its URL names them, and how scripts and commands run on them.

    redis://USER:PASSWORD@HOST:6379/DB
    redis+cluster://USER:PASSWORD@HOST:6379,HOST2:6379
    redis+sentinel://USER:PASSWORD@HOST:26379,HOST2:26379/SERVICE/DB

`rediss` instead of `redis` uses TLS. Options after `?` are those of redis-py, such as `ssl_ca_certs`, and
`sentinel_username`, `sentinel_password`.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from tokenproxy.record.store import RecordRefused, StoreError, StoreStalled, StoreUnusable

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
_SENTINEL = ("sentinel_username", "sentinel_password")
_SENTINEL_S = 0.5
"""Of a sentinel: others are asked after that."""
_FAILURES = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
_REPLICATED_MS = 100
"""How long a new turn waits until a replica has its index entries."""


Kind = Literal["server", "cluster", "sentinel"]
_KINDS: dict[str, Kind] = {"": "server", "cluster": "cluster", "sentinel": "sentinel"}
"""By what follows the scheme after `+`."""
_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_FORMS = {
    "server": "redis://user:password@host:6379/0",
    "cluster": "redis+cluster://user:password@host:6379,host2:6379",
    "sentinel": "redis+sentinel://user:password@host:26379,host2:26379/service/0",
}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL, read."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    """Servers of the cluster, or sentinels; more than one only of these."""
    service: str
    """Name of the master that the sentinels know; empty without sentinels."""
    options: Mapping[str, Any]
    """Arguments of a connection of redis-py, without its host and port; they hold the password."""
    sentinel_options: Mapping[str, Any]
    """The same for connections to the sentinels."""
    tls: bool
    name: str
    """The URL without user, password and options."""


class Call(NamedTuple):
    """A script or a command that is to be run."""

    name: str
    """The text of a script, or the name of a command."""
    keys: Sequence[bytes]
    """At least one; in a cluster all in one slot."""
    args: Sequence[Any]


class ClusterClient(RedisCluster):
    """The client of redis-py, but calls that run at the same time do not disturb each other.

    redis-py closes all connections before it asks the servers again who has which slot, also those that other
    calls are using. This one leaves them open: connections to servers that are gone fail when they are used.
    """

    async def aclose(self) -> None:
        """What redis-py calls before it asks the servers again."""
        self._initialize = True

    async def close_all(self) -> None:
        """Close all connections."""
        self._initialize = False
        await super().aclose()

    async def _execute_command(self, target_node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._execute_command(target_node, *args, **kwargs)
        except AttributeError as error:
            # a search for the servers that was given up has closed the connection while it was being made
            raise exceptions.ConnectionError("the connection was closed") from error


class RedisServers:
    """Connections to what a URL names.

    redis-py, when cancelled, closes its connection, and for a server that hangs waits until its timeout. So a
    call that is cancelled is left to that by itself.
    """

    def __init__(self, url: RedisUrl) -> None:
        """Raises ValueError for options that redis-py does not know; the message quotes no password."""
        self.url = url
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

    async def run(self, script: str, keys: Sequence[bytes], *args: Any) -> Any:
        """The reply of a script. Raises StoreError."""

        async def evaluate() -> Any:
            try:
                return await self.client.evalsha(_digest(script), len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self.client.eval(script, len(keys), *keys, *args)

        return await self.do(evaluate())

    async def run_each(self, calls: Sequence[Call], *, replicated: bool = False) -> list[Any]:
        """The replies of several calls, sent in one round trip to each server. Raises StoreError.

        Args:
            replicated: wait until a replica of each server has what was written, if there are replicas: a
                replica that becomes master then has it too.
        """
        if not calls:
            return []
        replies = await self.do(self._send(calls, cached=True, replicated=replicated))
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            again = [calls[i] for i in unknown]
            for i, reply in zip(unknown, await self.do(self._send(again, cached=False)), strict=True):
                replies[i] = reply
        with self.explained():
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

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
            kind, advice = _explanation(error, self.url)
            raise kind(f"{self.url.name}: {error}: {advice}") from error

    async def _send(self, calls: Sequence[Call], *, cached: bool, replicated: bool = False) -> list[Any]:
        pipeline = self.client.pipeline(transaction=False)
        for name, keys, args in calls:
            if name.isalpha():
                pipeline.execute_command(name, *keys, *args)
            elif cached:
                pipeline.execute_command("EVALSHA", _digest(name), len(keys), *keys, *args)
            else:
                pipeline.execute_command("EVAL", name, len(keys), *keys, *args)
        for target in self._with_replicas(calls) if replicated else ():
            pipeline.execute_command("WAIT", 1, _REPLICATED_MS, **target)
        try:
            return list(await pipeline.execute(raise_on_error=False))[: len(calls)]
        except AttributeError as error:
            # see `ClusterClient`
            raise exceptions.ConnectionError("the connection was closed") from error

    def _with_replicas(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """The servers of some calls that have replicas, as options of a command that is for one of them."""
        if not isinstance(self.client, ClusterClient):
            return [{}] if self.url.kind == "sentinel" else []
        slots = self.client.nodes_manager.slots_cache
        nodes = [slots.get(self.client.keyslot(call.keys[0]), []) for call in calls]
        return [{"target_nodes": node} for node in {of_slot[0] for of_slot in nodes if len(of_slot) > 1}]


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


_OF_DAMAGED_DATA = ("WRONGTYPE", "not an integer", "attempt to ", "bad argument", "would overflow")
"""In errors of scripts about one damaged key, which tell nothing about the server."""


def _explanation(error: Exception, url: RedisUrl) -> tuple[type[StoreError], str]:
    """The kind of an error, and what to do."""
    if isinstance(error, exceptions.NoPermissionError):
        return StoreUnusable, "give its user the commands and keys that docs/redis.md lists"
    if isinstance(error, _CREDENTIALS):
        return StoreUnusable, "check the user and the password in its URL"
    if isinstance(error, exceptions.MovedError | exceptions.ClusterCrossSlotError) and url.kind != "cluster":
        return StoreError, "it is part of a cluster: its URL begins with redis+cluster://"
    if isinstance(error, exceptions.ClusterDownError | exceptions.ClusterError | exceptions.TryAgainError):
        return StoreError, "is a server of the cluster down, or is a slot being moved?"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        stalled = isinstance(error, exceptions.TimeoutError | TimeoutError)
        return (
            StoreStalled if stalled else StoreError,
            "is the server running, and can it be reached from here?",
        )
    if isinstance(error, exceptions.OutOfMemoryError):
        return StoreError, "give the server more memory (maxmemory), or the store a lower limit"
    if isinstance(error, exceptions.RedisClusterException):
        return StoreError, "is it a cluster (cluster-enabled yes), and are all its slots assigned?"
    refused = isinstance(error, exceptions.DataError) or any(text in str(error) for text in _OF_DAMAGED_DATA)
    return RecordRefused if refused else StoreError, "is it Redis or Valkey, 6.2 or newer?"


def read_redis_url(url: str) -> RedisUrl:
    """Read a URL.

    Raises:
        ValueError: it cannot be read; the message quotes no password.
    """
    base, _, suffix = url.partition(":")[0].partition("+")
    kind = _KINDS[suffix]
    try:
        return _read(url, base, kind)
    except (ValueError, TypeError):
        # the cause may quote a password
        raise ValueError(
            f"not a Redis URL; it looks like {_FORMS[kind]}, special characters as %XX"
        ) from None


def _read(url: str, base: str, kind: Kind) -> RedisUrl:
    parts = urlsplit(url)
    credentials, _, places = parts.netloc.rpartition("@")
    hosts = tuple(_host(place, _PORTS[kind]) for place in places.split(","))
    service, db = _path(parts.path, kind)
    if kind == "server" and len(hosts) > 1:
        raise ValueError("a single server has one host")
    at = f"{credentials}@" if credentials else ""
    options: dict[str, Any] = dict(parse_url(f"{base}://{at}host{db}?{parts.query}"))
    del options["host"]
    tls = base == "rediss"
    sentinel = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL if name in options}
    sentinel |= {name: value for name, value in options.items() if name.startswith(("ssl_", "socket_"))}
    suffix = "" if kind == "server" else f"+{kind}"
    path = f"/{service}" if service else ""
    at_hosts = ",".join(f"{host}:{port}" for host, port in hosts)
    db_name = "" if kind == "cluster" else f"/{options.get('db', 0)}"
    return RedisUrl(
        kind=kind,
        hosts=hosts,
        service=service,
        options=options,
        sentinel_options=sentinel,
        tls=tls,
        name=f"{base}{suffix}://{at_hosts}{path}{db_name}",
    )


def _host(place: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{place}")
    return unquote(parts.hostname or "localhost"), parts.port or port


def _path(path: str, kind: str) -> tuple[str, str]:
    """The service and the path that names the database."""
    if kind == "server":
        return "", path
    if kind == "cluster":
        if path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has only database 0")
        return "", ""
    service, _, db = path.strip("/").partition("/")
    if not service or (db and not db.isdigit()):
        raise ValueError("sentinels need the name of a service")
    return unquote(service), f"/{db or 0}"


async def abandon_if_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A caller that is cancelled does not wait until `work` has cleaned up."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        # asyncio logs an exception that nobody retrieves
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise
