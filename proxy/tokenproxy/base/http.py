"""HTTP messages as values: a request goes in, a response of byte chunks comes out.

The same types serve both sides: what a client sent to the proxy, and what the proxy sends to an engine.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qs

import msgspec

from tokenproxy.base.types import Headers

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


@dataclass(slots=True)
class Request:
    """One HTTP request, its body read."""

    method: str
    path: str
    """Percent-encoded as it arrived, with the query string."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    repeatable: bool = False
    """Whether to send it again if the engine closes the connection before it responds."""
    tenant: str = ""
    """Digest of the request's credential after it was verified (`web/credentials.py`). Empty where all
    clients are one tenant, and for routes that need no tenant."""
    fresh: bool = False
    """Whether it must not use a pooled connection, which the engine may close at this moment: for a request
    that is neither repeated nor allowed to fail for that reason."""
    may_read: bool = True
    """Whether its client has the scope `read` (`web/keys.py`); every client has if no keys are set."""
    key_session: str = ""
    """Name of the session that the request's API key is for; empty where a key is for all of its tenant."""
    turns_only: bool = False
    """Whether its API key takes turns and does nothing else: none of them may pass by record and limits."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """What the template of its route matched in the path, decoded."""


def query_value(request: Request, name: str, default: str) -> str:
    """The last value of a parameter in the query."""
    return parse_qs(request.path.partition("?")[2]).get(name, [default])[-1]


class Response(Protocol):
    """One HTTP response. The receiver must `aclose` it; closing early aborts the engine's work."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive. Raises EngineBroken if the connection ends before the body."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises EngineBroken if the connection ends before the body."""
        ...

    async def aclose(self) -> None:
        """Give the connection back, or close it if the body was not read to its end."""
        ...


async def read_and_close(response: Response) -> bytes:
    """The whole body of a response, which is closed. Raises EngineBroken."""
    try:
        return await response.read()
    finally:
        await response.aclose()


class BytesResponse:
    """A response whose body is in memory."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = [pair for pair in headers if pair[0] != b"content-length"]
        self.headers.append((b"content-length", b"%d" % len(body)))
        self.body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in one piece."""
        yield self.body

    async def read(self) -> bytes:
        """The body."""
        return self.body

    async def aclose(self) -> None:
        """Nothing to give back."""


def json_response(value: object, status: int = 200, headers: Headers = JSON_HEADERS) -> BytesResponse:
    """A response whose body is a value as JSON."""
    return BytesResponse(status, headers, msgspec.json.encode(value))


class StreamResponse:
    """A response whose chunks are derived one by one from those of another response."""

    def __init__(self, status: int, headers: Headers, chunks: AsyncIterator[bytes], source: Response) -> None:
        self.status = status
        self.headers = headers
        self._chunks = chunks
        self._source = source

    def chunks(self) -> AsyncIterator[bytes]:
        """The chunks, in order."""
        return self._chunks

    async def read(self) -> bytes:
        """All chunks."""
        return b"".join([chunk async for chunk in self._chunks])

    async def aclose(self) -> None:
        """Close the response that this one is derived from."""
        await self._source.aclose()


def header(headers: Headers, name: bytes) -> bytes:
    """The value of a header; empty if it is missing."""
    for key, value in headers:
        if key == name:
            return value
    return b""


def is_event_stream(headers: Headers) -> bool:
    """Whether a body is a stream of server-sent events."""
    return header(headers, b"content-type").startswith(b"text/event-stream")
