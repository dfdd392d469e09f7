"""An engine on the other side of a socket: a stock vLLM server.

vLLM closes idle connections after 5 s. The pool drops them one second earlier; for the race that
is left, a repeatable request whose connection ends before the first byte of an answer is sent once more, on a
connection of its own.
"""

from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from proxy.errors import EngineBroken, EngineTimeout, EngineUnavailable
from proxy.http import Request, Response
from proxy.types import Headers

KEEPALIVE_S = 4.0
_PIECE = 256 * 1024
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
# uvicorn adds its own date and server
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}


def make_session(connect_timeout_s: float | None, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """A client session for any number of engines. Must be made inside a running event loop."""
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
        self._fresh: aiohttp.ClientSession | None = None
        self._authorization = f"Bearer {api_key}" if api_key else None

    async def send(self, request: Request) -> Response:
        """See `Engine.send`."""
        headers = [
            (name.decode("latin-1"), _text(value)) for name, value in request.headers if name not in _NOT_SENT
        ]
        if self._authorization:
            headers = [pair for pair in headers if pair[0] != "authorization"]
            headers.append(("authorization", self._authorization))
        if request.body or request.method in ("POST", "PUT", "PATCH"):
            headers.append(("content-length", str(len(request.body))))
        url = URL(self.name + request.path, encoded=True)
        session, again = self._session, request.repeatable
        while True:
            try:
                response = await session.request(
                    request.method, url, headers=headers, data=_payload(request.body), allow_redirects=False
                )
            except aiohttp.ClientConnectorError as error:
                raise EngineUnavailable(f"no engine answers at {self.name}: {error.os_error}") from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if not again:
                    raise EngineBroken(f"{self.name} closed the connection before it answered") from error
                session, again = self._fresh_session(), False
            except TimeoutError as error:
                raise EngineTimeout(f"{self.name} took too long to accept a connection") from error
            except aiohttp.ClientError as error:
                raise EngineBroken(f"{self.name}: {type(error).__name__}: {error}") from error
            else:
                return HttpResponse(response, self.name)

    async def aclose(self) -> None:
        """Close what was opened here; the session belongs to whoever made it."""
        if self._fresh is not None:
            await self._fresh.close()

    def _fresh_session(self) -> aiohttp.ClientSession:
        """A session that takes no connection out of a pool: all of those may have been closed at once."""
        if self._fresh is None:
            self._fresh = make_session(self._session.timeout.sock_connect, keep_alive=False)
        return self._fresh


class HttpResponse:
    """A response as it comes from the socket."""

    def __init__(self, response: aiohttp.ClientResponse, name: str) -> None:
        self.status = response.status
        self.headers: Headers = [
            (lower, value)
            for key, value in response.raw_headers
            if (lower := key.lower()) not in _NOT_RETURNED
        ]
        self._response = response
        self._name = name

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
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
        """Back to the pool if the body was read to its end, else closed: vLLM then aborts the request."""
        if self._response.content.at_eof() and self._response.content.exception() is None:
            self._response.release()
        else:
            self._response.close()


def normalise_base_url(url: str) -> str:
    """`http://host:8000` from any of `http://host:8000`, `http://host:8000/`, `http://host:8000/v1/`.

    Raises:
        ValueError: it is not an http or https URL.
    """
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not an http(s) URL, like http://127.0.0.1:8000")
    root = str(parsed.with_query(None).with_fragment(None)).rstrip("/")
    return root.removesuffix("/v1").rstrip("/")


def _text(value: bytes) -> str:
    """A header's value for aiohttp, which writes UTF-8: that goes out as the same bytes, Latin-1 as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _payload(body: bytes) -> bytes | AsyncIterator[bytes] | None:
    """Large bodies go out in pieces, so that one of them does not hold the event loop."""
    if not body:
        return None
    return body if len(body) <= _PIECE else _pieces(body)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]
