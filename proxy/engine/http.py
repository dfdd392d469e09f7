"""An engine that is reached over HTTP: any vLLM server.

vLLM closes idle connections after 5 s, so the pool drops them after 4 s. A pooled connection may still be
closed while a request is being sent: if it ends at once and before the first byte of the response, a
repeatable request is sent once more, on a new connection.

A restart of the engine ends all its connections. So before the first POST over each new connection, a
callback verifies that the engine still serves the same model: see `HttpEngine.verify`.
"""

import asyncio
import errno
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import aiohttp
from yarl import URL

from proxy.errors import EngineBroken, EngineTimeout, EngineUnavailable, OutOfSockets
from proxy.http import Request, Response, is_event_stream
from proxy.types import Headers

KEEPALIVE_S = 4.0
_PIECE_BYTES = 256 * 1024
_STREAM_PIECE_BYTES = 64 * 1024
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
_OUR_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that stop this process from opening a connection, independent of the engine."""
_STALE_S = 1.0
"""Seconds within which a request over a connection that was closed before it fails."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
GRACE_S = 5.0
SLOWEST = 20_000
"""Bytes per second, after GRACE_S, of what an engine sends in one piece: a whole body, or one event."""
Verify = Callable[[], Awaitable[None]]
_reused: ContextVar[bool] = ContextVar("_reused", default=False)
"""Whether the running request was sent over a connection that had served others; `Connector` sets it."""
# the proxy's uvicorn adds its own `date` and `server`
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}


def make_session(connect_timeout_s: float | None, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """A client session for any number of engines. Call it inside a running event loop."""
    return aiohttp.ClientSession(
        connector=(
            Connector(limit=0, keepalive_timeout=KEEPALIVE_S)
            if keep_alive
            else Connector(limit=0, force_close=True)
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=2**18,
    )


class Connector(aiohttp.TCPConnector):
    """A connector that lets an engine be verified before the first POST over each connection."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._verifiers: dict[tuple[str | None, int | None], dict[str, Verify]] = {}
        """By host and port, then by the engine's name: several engines may share an address."""
        self._verified: WeakSet[object] = WeakSet()
        self._used: WeakSet[object] = WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, *options: Any, **named: Any
    ) -> aiohttp.connector.Connection:
        """See `aiohttp.BaseConnector.connect`."""
        connection = await super().connect(req, *options, **named)
        protocol = connection.protocol
        reused = protocol in self._used
        if protocol is not None:
            self._used.add(protocol)
        if req.method == "POST" and protocol is not None and protocol not in self._verified:
            try:
                for verify in list(self._verifiers.get((req.url.host, req.url.port), {}).values()):
                    await verify()
            except BaseException:
                connection.close()
                raise
            self._verified.add(protocol)
        _reused.set(reused)  # last: verifying sends requests too
        return connection

    def verify(self, name: str, verify: Verify | None, before: Verify | None) -> None:
        """Set or remove the callback before the first POST over each connection to the engine with this name.

        Args:
            before: the callback that the same owner set earlier; another owner's callback is kept.
        """
        url = URL(name)
        verifiers = self._verifiers.setdefault((url.host, url.port), {})
        if verify is not None:
            verifiers[name] = verify
        elif verifiers.get(name) == before:
            verifiers.pop(name, None)
        if not verifiers:
            del self._verifiers[url.host, url.port]


class _Disconnected(Exception):
    """The connection ended before the first byte of a response."""


class HttpEngine:
    """One vLLM server. `base_url` is its root, with or without `/v1` and a trailing slash."""

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        api_key: str | None = None,
        idle_timeout_s: float | None = None,
    ) -> None:
        """A user and password in `base_url` are sent as Basic credentials, in place of `api_key`.

        They are never part of `name`, which is in logs, errors, metrics and `/ready`.

        Args:
            idle_timeout_s: how long a stream may pause; None for no limit.
        """
        self.name = without_credentials(normalise_base_url(base_url))
        self._session = session
        self._idle_timeout_s = idle_timeout_s
        self._verify: Verify | None = None
        self._unpooled: aiohttp.ClientSession | None = None
        self._authorization = url_credentials(base_url) or (f"Bearer {api_key}" if api_key else None)

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        headers = [
            (name.decode("latin-1"), _header_text(value))
            for name, value in request.headers
            if name not in _NOT_SENT
        ]
        if self._authorization:
            headers = [pair for pair in headers if pair[0] != "authorization"]
            headers.append(("authorization", self._authorization))
        if request.body or request.method in ("POST", "PUT", "PATCH"):
            headers.append(("content-length", str(len(request.body))))
        url = URL(self.name + request.path, encoded=True)
        began = time.monotonic()
        try:
            return await self._send(self._session, request, url, headers)
        except _Disconnected:
            closed = EngineBroken(f"{self.name} closed the connection before it responded")
            # a connection that the engine closed while it was idle breaks at once
            stale = _reused.get() and time.monotonic() - began < _STALE_S
            if not request.repeatable or not stale:
                raise closed from None
        try:
            return await self._send(self._unpooled_session(), request, url, headers)
        except (_Disconnected, EngineUnavailable, EngineTimeout):
            # the engine may have received the first attempt, so this is not EngineUnavailable
            raise closed from None

    async def _send(
        self, session: aiohttp.ClientSession, request: Request, url: URL, headers: list[tuple[str, str]]
    ) -> "HttpResponse":
        """One attempt. Raises _Disconnected, and as `send`."""
        _reused.set(False)
        try:
            response = await session.request(
                request.method,
                url,
                headers=headers,
                data=_payload(request.body),  # for each attempt: a large body is read only once
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as error:
            if error.os_error.errno in _OUR_OWN_ERRORS:
                raise OutOfSockets(
                    f"this proxy cannot open a connection: {error.os_error.strerror}; raise its limit of "
                    "open files (ulimit -n), or send fewer requests at once",
                    code="out_of_sockets",
                ) from error
            raise EngineUnavailable(f"no engine responds at {self.name}: {error.os_error}") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _Disconnected from error
        except TimeoutError as error:
            raise EngineTimeout(f"{self.name} did not accept a connection in time") from error
        except aiohttp.ClientError as error:
            raise EngineBroken(f"{self.name}: {type(error).__name__}: {error}") from error
        return HttpResponse(response, self.name, self._idle_timeout_s)

    def verify(self, verify: Verify | None) -> None:
        """Set the callback before the first POST over each new connection; it raises to stop the request.

        None while discovery runs: it verifies the engine itself.
        """
        before, self._verify = self._verify, verify
        for session in (self._session, self._unpooled):
            if session is not None:
                self._set_verifier(session, before)

    def _set_verifier(self, session: aiohttp.ClientSession, before: Verify | None = None) -> None:
        if isinstance(session.connector, Connector):
            session.connector.verify(self.name, self._verify, before)

    async def aclose(self) -> None:
        """Close the session for retries; the caller closes the session that it passed."""
        self.verify(None)
        if self._unpooled is not None:
            await self._unpooled.close()

    def _unpooled_session(self) -> aiohttp.ClientSession:
        """A session that opens a connection for every request: the engine may have closed all pooled ones."""
        if self._unpooled is None:
            self._unpooled = make_session(self._session.timeout.sock_connect, keep_alive=False)
            self._set_verifier(self._unpooled)
        return self._unpooled


class ReadLimit:
    """How long the next bytes of a body may take.

    A stream may pause between two events. An event, or a body that is not a stream, must arrive at a minimum
    rate; an engine that is slower counts as broken. Only time spent waiting for the engine counts, not the
    time that a slow client takes.
    """

    def __init__(self, stream: bool, idle_timeout_s: float | None) -> None:
        self._stream = stream
        self._idle_timeout_s = idle_timeout_s
        self._between = stream
        """Whether the last bytes ended an event."""
        self._bytes = 0
        self._waited_s = 0.0
        self._last = b""
        """The last four bytes: the end of an event may arrive in two pieces."""

    def seconds(self) -> float | None:
        """Seconds to wait for the next bytes; None for no limit."""
        if self._between:
            return self._idle_timeout_s
        return max(0.0, GRACE_S + self._bytes / SLOWEST - self._waited_s)

    def received(self, chunk: bytes, waited_s: float) -> None:
        """Take note of bytes that arrived after a wait of `waited_s` seconds."""
        ended = self._stream and any(self._ends(end, chunk) for end in _EVENT_ENDS)
        self._last = (self._last + chunk[-4:])[-4:]
        if ended:
            self._between = self._last.endswith(_EVENT_ENDS)
            self._bytes, self._waited_s = 0, 0.0  # of the event that began in this chunk
        elif self._between:
            self._between = False
        else:
            self._waited_s += waited_s
        self._bytes += len(chunk)

    def _ends(self, end: bytes, chunk: bytes) -> bool:
        """Whether a chunk completes an event that ends with `end`."""
        part = len(end) - 1
        return end in chunk or end in self._last[-part:] + chunk[:part]


class HttpResponse:
    """A response that is read from the socket as the caller consumes it."""

    def __init__(
        self, response: aiohttp.ClientResponse, name: str, idle_timeout_s: float | None = None
    ) -> None:
        self.status = response.status
        self.headers: Headers = [
            (lower_name, value)
            for key, value in response.raw_headers
            if (lower_name := key.lower()) not in _NOT_RETURNED
        ]
        self._response = response
        self._name = name
        self._idle_timeout_s = idle_timeout_s

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive.

        Raises:
            EngineBroken: the connection broke.
            EngineTimeout: the stream pauses for too long, or its bytes arrive too slowly.
        """
        stream = is_event_stream(self.headers)
        limit, content = ReadLimit(stream, self._idle_timeout_s), self._response.content
        try:
            while True:
                began = time.monotonic()
                async with asyncio.timeout(limit.seconds()):
                    # small pieces, because several steps each hold one while the client does not read
                    chunk = await (content.read(_STREAM_PIECE_BYTES) if stream else content.readany())
                if not chunk:
                    return
                limit.received(chunk, time.monotonic() - began)
                yield chunk
        except TimeoutError as error:
            raise EngineTimeout(f"{self._name} sends its response too slowly", received=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineBroken(f"{self._name} broke off in the middle of its response") from error

    async def read(self) -> bytes:
        """The whole body. Raises as `chunks`."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """After the whole body return the connection to the pool, else close it: vLLM then aborts."""
        if self._response.content.at_eof() and self._response.content.exception() is None:
            self._response.release()
        else:
            self._response.close()


def normalise_base_url(url: str) -> str:
    """The server's root URL: `http://host:8000`, `http://host:8000/` and `/v1/` all give `http://host:8000`.

    Raises:
        ValueError: `url` is not an http or https URL.
    """
    try:
        parsed = URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except ValueError:
        usable = False
    if not usable:
        # the part before an @ may hold a password
        shown = url.rpartition("@")[2]
        raise ValueError(f"{shown!r} is not an http(s) URL: use one like http://127.0.0.1:8000")
    root = str(parsed.with_query(None).with_fragment(None)).rstrip("/")
    return root.removesuffix("/v1").rstrip("/")


def url_credentials(url: str) -> str | None:
    """The Authorization header for the user and password in a URL; None if it has none."""
    parsed = URL(url)
    if parsed.user is None and parsed.password is None:
        return None
    pair = f"{parsed.user or ''}:{parsed.password or ''}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def without_credentials(url: str) -> str:
    """A URL without user and password, for logs and errors."""
    return str(URL(url).with_user(None))


def _header_text(value: bytes) -> str:
    """Decode a header value for aiohttp, which encodes as UTF-8: only Latin-1 values change their bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _payload(body: bytes) -> bytes | AsyncIterator[bytes] | None:
    """The body for aiohttp; a large one in pieces, so that writing it does not block the event loop."""
    if not body:
        return None
    return body if len(body) <= _PIECE_BYTES else _pieces(body)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
