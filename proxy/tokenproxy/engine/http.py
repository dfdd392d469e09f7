"""An engine that is reached over HTTP: any vLLM server.

Connections are opened when needed, and used again while the engine keeps them open. One may be closed by the
engine while a request is being sent over it: if it ends at once and before the first byte of the response, a
repeatable request is sent once more, on a new connection.

A restart of the engine ends all its connections. So before the first POST over each new connection, a
callback verifies that the engine still serves the same model: see `HttpEngine.verify`.
"""

import asyncio
import errno
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohappyeyeballs import start_connection
from yarl import URL

from tokenproxy.base.errors import (
    ApiError,
    BadRequest,
    EngineBroken,
    EngineTimeout,
    EngineUnavailable,
    OutOfSockets,
)
from tokenproxy.base.http import Request, is_event_stream
from tokenproxy.base.types import Headers
from tokenproxy.base.urls import normalise_base_url, url_credentials, without_credentials
from tokenproxy.engine.connection import BrokenOff, Connection, Disconnected
from tokenproxy.engine.protocol import Call

_CONNECT_TIMEOUT_S = 5.0
"""How long an engine may take to accept a connection."""
_KEEPALIVE_S = 4.0
"""vLLM closes idle connections after 5 s."""
_OUR_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that stop this process from opening a connection, independent of the engine."""
_NEXT_ADDRESS_S = 0.25
"""After this many seconds the next address of a host is tried as well: RFC 8305."""
_GRACE_S = 5.0
_SLOWEST = 20_000
"""Bytes per second, after _GRACE_S, of a body that is no stream; a slower engine counts as broken."""
_STREAM_PIECE_BYTES = 64 * 1024
_BODY_PIECE_BYTES = 2**30
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_SENT = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_STALE_S = 1.0
"""Seconds within which a request over a connection that was closed before it fails."""
# the proxy's uvicorn adds its own `date` and `server`
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, so that their requests can be sent again."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_NO_BODY = (204, 304)
"""Statuses of responses without a body, even if `Content-Length` is not 0."""


class HttpEngine:
    """One vLLM server. `base_url` is its root, with or without `/v1` and a trailing slash."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
        idle_timeout_s: float | None = None,
        suspended_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A user and password in `base_url` are sent as Basic credentials, in place of `api_key`.

        They are never part of `name`, which is in logs, errors, metrics and `/ready`.

        Args:
            connect_timeout_s: how long a connection may take to open.
            idle_timeout_s: how long a stream may pause; None for no limit.
            suspended_seconds: returns how long engines were paused until now. A pause starts the time anew.
            clock: the time that the event loop's own waits follow.
        """
        self.clock = clock
        self.suspended_seconds = suspended_seconds
        self.name = without_credentials(normalise_base_url(base_url))
        self.idle_timeout_s = idle_timeout_s
        url = URL(self.name)
        self._path = url.raw_path.rstrip("/")
        self._authority = url.raw_authority.encode()
        self._host, self._port = url.host or "", url.port or 80
        self._is_address = _is_address(self._host)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._verify: Callable[[], Awaitable[None]] | None = None
        self._idle: list[Connection] = []
        """The connection used last is at the end."""
        self._closed = False
        authorization = url_credentials(base_url) or (f"Bearer {api_key}" if api_key else None)
        self._authorization = authorization.encode() if authorization else None

    async def send(self, request: Request) -> "HttpResponse":
        """See `Engine.send`.

        Raises:
            BadRequest: a header or the path holds a line break.
        """
        head = self._head(request)
        connection = await self._connection(request.method, fresh=request.fresh)
        began = self.clock()
        try:
            return await self._send(connection, request, head)
        except Disconnected:
            closed = EngineBroken(f"{self.name} closed the connection before it responded")
            # a connection that the engine closed while it was idle breaks at once
            stale = connection.reused and self.clock() - began < _STALE_S
            if not (request.repeatable or request.method in _SAFE) or not stale:
                raise closed from None
        try:
            # the engine may have closed all idle connections
            return await self._send(await self._connection(request.method, fresh=True), request, head)
        except (Disconnected, EngineUnavailable, EngineTimeout):
            # the engine may have received the first attempt, so this is not EngineUnavailable
            raise closed from None

    async def _send(self, connection: Connection, request: Request, head: bytes) -> "HttpResponse":
        """One attempt. Raises Disconnected, EngineBroken."""
        try:
            await connection.send(request.method, head, request.body)
        except BrokenOff as error:
            connection.abort()
            raise EngineBroken(f"{self.name}: {error}") from error
        except BaseException:  # cancellation too: the response of this request must not reach the next one
            connection.abort()
            raise
        return HttpResponse(connection, self)

    def _head(self, request: Request) -> bytes:
        """The request line and the headers."""
        lines = [f"{request.method} {self._path}{request.path} HTTP/1.1".encode("latin-1")]
        lines.append(b"host: " + self._authority)
        own, not_sent = self._authorization, _NOT_SENT | _connection_options(request.headers)
        for name, value in request.headers:
            if name not in not_sent and (own is None or name != b"authorization"):
                lines.append(b"%b: %b" % (name, value))
        if own is not None:
            lines.append(b"authorization: " + own)
        if request.body or request.method in _WITH_BODY:
            lines.append(b"content-length: %d" % len(request.body))
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise BadRequest("a header or the path holds a line break", param="headers")
        return head + b"\r\n\r\n"

    async def _connection(self, method: str, *, fresh: bool = False) -> Connection:
        """A connection for one request.

        Args:
            fresh: whether it must be a new one.

        Raises:
            EngineUnavailable, EngineTimeout, OutOfSockets: none can be opened.
            ApiError: as `verify`.
        """
        connection = None
        while self._idle and connection is None and not fresh:
            connection = self._idle.pop()
            idle_s = asyncio.get_running_loop().time() - connection.idle_since
            if not connection.usable or idle_s >= _KEEPALIVE_S:
                connection.abort()
                connection = None
        if connection is None:
            connection = await self._open()
        if method == "POST" and not connection.verified:
            try:
                if self._verify is not None:
                    await self._verify()
            except BaseException:  # cancellation too: the connection is in no pool that would close it
                connection.abort()
                raise
            connection.verified = True
        return connection

    def give_back(self, connection: Connection) -> None:
        """Take a connection back after its response; one that cannot be used again is closed."""
        if self._closed or not connection.usable:
            connection.abort()
            return
        connection.reused, connection.idle_since = True, asyncio.get_running_loop().time()
        self._idle.append(connection)
        # the engine closes those that nobody gives back after
        while connection.idle_since - self._idle[0].idle_since > _KEEPALIVE_S:
            self._idle.pop(0).abort()

    def verify(self, verify: Callable[[], Awaitable[None]] | None) -> None:
        """Set the callback before the first POST over each new connection; it raises to stop the request.

        None while discovery runs: it verifies the engine itself.
        """
        self._verify = verify

    async def aclose(self) -> None:
        """Close the idle connections, and others when they are given back."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

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
                raise EngineUnavailable(f"no engine responds at {self.name}: {error}") from error
            raise EngineTimeout(f"{self.name} did not accept a connection in time") from error
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
            raise EngineUnavailable(f"no engine responds at {self.name}: {error}{hint}") from error


def _connection_options(headers: Headers) -> set[bytes]:
    """The headers that `Connection` names: they end at the next hop (RFC 9110, 7.6.1)."""
    values = [value for name, value in headers if name == b"connection"]
    return {option.strip().lower() for value in values for option in value.split(b",")}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HttpResponse:
    """A response that is read from the socket as the caller consumes it."""

    def __init__(self, connection: Connection, engine: HttpEngine) -> None:
        self.status = connection.status
        left_out = _NOT_RETURNED | _connection_options(connection.headers)
        if self.status in _NO_BODY:
            left_out |= {b"content-length"}
        self.headers: Headers = [pair for pair in connection.headers if pair[0] not in left_out]
        self._connection: Connection | None = connection
        self._engine = engine
        self._suspended_s = engine.suspended_seconds()
        self.call: Call | None = None
        """What observes its waits and its end."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive.

        Raises:
            EngineBroken: the connection broke.
            EngineTimeout: the stream pauses for too long, or its bytes arrive too slowly.
        """
        connection, engine = self._connection, self._engine
        if connection is None:
            return
        stream = is_event_stream(self.headers)
        # small pieces, because several steps each hold one while the client does not read
        piece_bytes = _STREAM_PIECE_BYTES if stream else _BODY_PIECE_BYTES
        # only time spent waiting for the engine counts, not that of a slow client
        received, waited_s = 0, 0.0
        try:
            while (chunk := connection.take(piece_bytes)) != b"":
                if chunk is not None:
                    received, waited_s = received + len(chunk), 0.0 if stream else waited_s
                    yield chunk
                    continue
                limit_s = engine.idle_timeout_s if stream else _GRACE_S + received / _SLOWEST
                began = engine.clock()
                try:
                    await connection.wait(None if limit_s is None else max(0.0, limit_s - waited_s))
                    waited_s += engine.clock() - began
                except TimeoutError:
                    if not self._was_paused():
                        raise
                    waited_s = 0.0
                finally:
                    if self.call is not None:
                        self.call.exchange.waited_s += engine.clock() - began
        except TimeoutError as error:
            raise self._failed(
                EngineTimeout(f"{engine.name} sends its response too slowly", received=True)
            ) from error
        except BrokenOff as error:
            raise self._failed(
                EngineBroken(f"{engine.name} broke off in the middle of its response")
            ) from error

    def _failed(self, error: ApiError) -> ApiError:
        if self.call is not None:
            self.call.end(error)
        return error

    def _was_paused(self) -> bool:
        """Whether the engine is paused, or was since the last call: then its silence proves nothing."""
        suspended_s, self._suspended_s = self._suspended_s, self._engine.suspended_seconds()
        return self._suspended_s > suspended_s

    async def read(self) -> bytes:
        """The whole body. Raises as `chunks`."""
        if self._connection is not None and self._connection.complete:  # usually, with its head
            return self._connection.take(_BODY_PIECE_BYTES) or b""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """After the whole body return the connection to the pool, else close it: vLLM then aborts."""
        if self.call is not None:
            self.call.end()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._engine.give_back(connection)
