"""An engine that is reached over HTTP: any vLLM server.

vLLM closes idle connections after 5 s, so the pool drops them after 4 s. A connection may still be closed
while a request is being sent: if it ends before the first byte of the response, a repeatable request is sent
once more, on a new connection.
"""

from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from proxy.errors import EngineBroken, EngineTimeout, EngineUnavailable
from proxy.http import Request, Response
from proxy.types import Headers

KEEPALIVE_S = 4.0
_PIECE_BYTES = 256 * 1024
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
# the proxy's uvicorn adds its own `date` and `server`
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}


def make_session(connect_timeout_s: float | None, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """A client session for any number of engines. Call it inside a running event loop."""
    return aiohttp.ClientSession(
        connector=(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            if keep_alive
            else aiohttp.TCPConnector(limit=0, force_close=True)
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=2**18,
    )


class HttpEngine:
    """One vLLM server. `base_url` is its root, with or without `/v1` and a trailing slash."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, api_key: str | None = None) -> None:
        self.name = normalise_base_url(base_url)
        self._session = session
        self._unpooled: aiohttp.ClientSession | None = None
        self._authorization = f"Bearer {api_key}" if api_key else None

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
        session, may_retry = self._session, request.repeatable
        while True:
            try:
                response = await session.request(
                    request.method, url, headers=headers, data=_payload(request.body), allow_redirects=False
                )
            except aiohttp.ClientConnectorError as error:
                raise EngineUnavailable(f"no engine responds at {self.name}: {error.os_error}") from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if not may_retry:
                    raise EngineBroken(f"{self.name} closed the connection before it responded") from error
                session, may_retry = self._unpooled_session(), False
            except TimeoutError as error:
                raise EngineTimeout(f"{self.name} did not accept a connection in time") from error
            except aiohttp.ClientError as error:
                raise EngineBroken(f"{self.name}: {type(error).__name__}: {error}") from error
            else:
                return HttpResponse(response, self.name)

    async def aclose(self) -> None:
        """Close the session for retries; the caller closes the session that it passed."""
        if self._unpooled is not None:
            await self._unpooled.close()

    def _unpooled_session(self) -> aiohttp.ClientSession:
        """A session that opens a connection for every request: the engine may have closed all pooled ones."""
        if self._unpooled is None:
            self._unpooled = make_session(self._session.timeout.sock_connect, keep_alive=False)
        return self._unpooled


class HttpResponse:
    """A response that is read from the socket as the caller consumes it."""

    def __init__(self, response: aiohttp.ClientResponse, name: str) -> None:
        self.status = response.status
        self.headers: Headers = [
            (lower_name, value)
            for key, value in response.raw_headers
            if (lower_name := key.lower()) not in _NOT_RETURNED
        ]
        self._response = response
        self._name = name

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineBroken(f"{self._name} broke off in the middle of its answer") from error

    async def read(self) -> bytes:
        """The whole body."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineBroken(f"{self._name} broke off in the middle of its answer") from error

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
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not an http(s) URL: use one like http://127.0.0.1:8000")
    root = str(parsed.with_query(None).with_fragment(None)).rstrip("/")
    return root.removesuffix("/v1").rstrip("/")


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
