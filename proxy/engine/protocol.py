"""What the other rooms see of an engine: a request goes in, an answer of byte chunks comes out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from proxy.types import Headers

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


@dataclass(slots=True)
class Call:
    """One HTTP request for an engine."""

    method: str
    path: str
    """Path, percent-encoded as it arrived, with the query string."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    repeatable: bool = False
    """Whether it may be sent again if the engine hangs up before it answers."""


class Answer(Protocol):
    """One HTTP response. Whoever got it must `aclose` it; closing early aborts the engine's work."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises EngineBroken if the engine hangs up before its end."""
        ...

    async def read(self) -> bytes:
        """The whole body. Raises EngineBroken if the engine hangs up before its end."""
        ...

    async def aclose(self) -> None:
        """Give the connection back, or close it if the body was not read to its end."""
        ...


class Engine(Protocol):
    """One vLLM."""

    name: str

    async def send(self, call: Call) -> Answer:
        """Send a request and wait for the head of the answer.

        Raises:
            EngineUnavailable: nothing listens there; the request was not received.
            EngineBroken: the connection broke before an answer came.
            EngineTimeout: connecting took too long.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class BytesAnswer:
    """An answer made here."""

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


class StreamAnswer:
    """An answer whose chunks are made here, one after the other, from another answer."""

    def __init__(self, status: int, headers: Headers, chunks: AsyncIterator[bytes], source: Answer) -> None:
        self.status = status
        self.headers = headers
        self._chunks = chunks
        self._source = source

    def chunks(self) -> AsyncIterator[bytes]:
        """The chunks as they are made."""
        return self._chunks

    async def read(self) -> bytes:
        """All chunks."""
        return b"".join([chunk async for chunk in self._chunks])

    async def aclose(self) -> None:
        """Close the answer that feeds this one."""
        await self._source.aclose()


def is_event_stream(headers: Headers) -> bool:
    """Whether a body is a stream of server-sent events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
