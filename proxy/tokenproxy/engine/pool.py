"""The connections to one engine: opened when needed, used again while the engine keeps them open."""

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable

from aiohappyeyeballs import start_connection
from yarl import URL

from tokenproxy.base.errors import EngineTimeout, EngineUnavailable, OutOfSockets
from tokenproxy.engine.connection import Connection

CONNECT_TIMEOUT_S = 5.0
"""How long an engine may take to accept a connection."""
KEEPALIVE_S = 4.0
"""vLLM closes idle connections after 5 s."""
_OUR_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that stop this process from opening a connection, independent of the engine."""
_NEXT_ADDRESS_S = 0.25
"""After this many seconds the next address of a host is tried as well: RFC 8305."""

Verify = Callable[[], Awaitable[None]]


class ConnectionPool:
    """Connections to one address."""

    def __init__(self, url: URL, name: str, connect_timeout_s: float) -> None:
        """No connection is opened yet.

        Args:
            url: scheme, host and port.
            name: the engine's, for errors.
            connect_timeout_s: how long a connection may take to open.
        """
        self.verify: Verify | None = None
        """Called before the first POST over each connection; it raises to stop the request."""
        self._host, self._port = url.host or "", url.port or 80
        self._is_address = _is_address(self._host)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._name = name
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        """The one used last is at the end."""
        self._closed = False

    async def get(self, method: str, *, fresh: bool = False) -> Connection:
        """A connection for one request.

        Args:
            fresh: whether it must be a new one.

        Raises:
            EngineUnavailable, EngineTimeout, OutOfSockets: none can be opened.
            ApiError: as `verify`.
        """
        connection = None if fresh else self._pop()
        if connection is None:
            connection = await self._open()
        if method == "POST" and not connection.verified:
            try:
                if self.verify is not None:
                    await self.verify()
            except BaseException:  # cancellation too: the connection is in no pool that would close it
                connection.abort()
                raise
            connection.verified = True
        return connection

    def give_back(self, connection: Connection) -> None:
        """Take a connection back after its response; one that cannot be used again is closed."""
        if self._closed or not connection.usable or not connection.complete:
            connection.abort()
            return
        connection.reused, connection.idle_since = True, asyncio.get_running_loop().time()
        self._idle.append(connection)
        # the engine closes those that nobody gives back after
        while connection.idle_since - self._idle[0].idle_since > KEEPALIVE_S:
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Close the idle connections, and others when they are given back."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _pop(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            idle_s = asyncio.get_running_loop().time() - connection.idle_since
            if connection.usable and idle_s < KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._is_address:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
            return connection
        addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        # of several addresses the first may swallow packets
        opened = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        name = self._host if self._tls else None
        _, connection = await loop.create_connection(
            Connection, sock=opened, ssl=self._tls, server_hostname=name
        )
        return connection

    async def _open(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._connect()
        except TimeoutError as error:
            if error.errno is not None:  # the kernel's own
                raise EngineUnavailable(f"no engine responds at {self._name}: {error}") from error
            raise EngineTimeout(f"{self._name} did not accept a connection in time") from error
        except OSError as error:
            if error.errno in _OUR_OWN_ERRORS:
                raise OutOfSockets(
                    f"this proxy cannot open a connection: {error.strerror}; raise its limit of open files "
                    "(ulimit -n), or send fewer requests at once",
                    code="out_of_sockets",
                ) from error
            hint = (
                ": is it http://, or its certificate not trusted?" if isinstance(error, ssl.SSLError) else ""
            )
            raise EngineUnavailable(f"no engine responds at {self._name}: {error}{hint}") from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
