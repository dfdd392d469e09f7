"""One HTTP/1.1 connection to an engine: a request and its response, then the next.

Written for the path of every request: bytes in, bytes out, and no timer or task while the bytes are there
already. httptools, which uvicorn brings, parses the responses.
"""

import asyncio
import socket
from typing import cast

import httptools

from tokenproxy.base.types import Headers

_MOST_BUFFERED = 256 * 1024
"""Bytes of a body that are held unread; then the kernel's buffers fill, and the engine waits."""
_PIECE_BYTES = 256 * 1024
"""Bytes that are handed to the transport at once."""
_SMALL = 64 * 1024
"""Up to this many bytes head and body are one write."""


class Disconnected(Exception):
    """The connection ended before the first byte of a response."""


class BrokenOff(Exception):
    """The connection ended in the middle of a response, or what came is not HTTP."""


class Connection(asyncio.Protocol):
    """A connection that was opened. Not to be used by two requests at once."""

    def __init__(self) -> None:
        self.reused = False
        """Whether it served a request before the current one."""
        self.verified = False
        """Whether the engine at its other end was found to be the right one."""
        self.idle_since = 0.0
        self.status = 0
        self.headers: Headers = []
        """Of the response; names in lower case."""
        self.complete = False
        """Whether the response arrived to its end."""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        """None after the end: the two hold each other, and what was not read."""
        self._waiter: asyncio.Future[None] | None = None
        self._writable = True
        self._reading = True
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._timed_out = False
        self._begin("")

    def _begin(self, method: str) -> None:
        """Forget the response before."""
        self._method = method
        self._informational = False
        self._body_sent = self._head_complete = self.complete = self._keeps_alive = False
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._buffered = 0

    @property
    def usable(self) -> bool:
        """Whether the next request can be sent over it."""
        transport = self._transport
        kept = self._open and self._keeps_alive and self._body_sent and not self._pieces
        return kept and transport is not None and not transport.is_closing()

    async def send(self, method: str, head: bytes, body: bytes) -> None:
        """Send a request and wait for the head of its response: `status` and `headers`.

        Args:
            head: the request line and all headers, to the empty line after them.

        Raises:
            Disconnected: the connection ended, and no byte of a response came.
            BrokenOff: what came is no response.
        """
        self._begin(method)
        if len(body) <= _SMALL:
            self._write(head + body)
            self._body_sent = True
        else:
            self._write(head)
            await self._send_body(body)
        while not self._head_complete:
            if self._error is not None:
                raise self._error
            await self._event()

    async def _send_body(self, body: bytes) -> None:
        """Send a body in pieces, as fast as the engine takes it; stop if a response comes before its end."""
        view = memoryview(body)
        for start in range(0, len(body), _PIECE_BYTES):
            while not self._writable and not self._head_complete and self._error is None:
                await self._event()
            if self._head_complete or self._error is not None:
                return  # the engine still expects the rest: the next request would be taken for it
            self._write(view[start : start + _PIECE_BYTES])
        self._body_sent = True

    def _write(self, data: bytes | memoryview) -> None:
        if self._open and self._transport is not None:
            self._transport.write(data)
        elif self._error is None:
            self._error = Disconnected()

    def take(self, limit: int) -> bytes | None:
        """The next bytes of the body that are there, at most `limit`; b"" at its end, None if none are there.

        Raises:
            BrokenOff: the connection ended before the body.
        """
        pieces = self._pieces
        if not pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            return None
        if self._buffered <= limit:
            taken = b"".join(pieces)
            pieces.clear()
        else:
            first = pieces.pop(0)
            taken, rest = first[:limit], first[limit:]
            if rest:
                pieces.insert(0, rest)
        self._buffered -= len(taken)
        if not self._reading and 2 * self._buffered < _MOST_BUFFERED and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return taken

    async def wait(self, seconds: float | None) -> None:
        """Wait for the next event: bytes of the body, or others that belong to the response, or its end.

        Args:
            seconds: how long at most; None for no limit.

        Raises:
            TimeoutError: nothing came in that time.
        """
        if self._pieces or self.complete or self._error is not None:
            return
        if seconds is None:
            await self._event()
            return
        # `asyncio.timeout` would cost more than all else that is done with the bytes of one event
        self._timed_out = False
        timer = self._loop.call_later(seconds, self._time_out)
        try:
            await self._event()
        finally:
            timer.cancel()
        if self._timed_out and not self._pieces and not self.complete and self._error is None:
            raise TimeoutError

    def abort(self) -> None:
        """Close at once. What was not sent and what was not read is dropped."""
        self._close()
        self._pieces.clear()
        self._buffered = 0

    def _close(self) -> None:
        """Close at once. What was received can still be read."""
        self._open = False
        self._parser = None
        if self._transport is not None:
            self._transport.abort()

    def _event(self) -> "asyncio.Future[None]":
        """The next event of the connection."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def _time_out(self) -> None:
        self._timed_out = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol.connection_made`."""
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            # an engine whose machine is gone is noticed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BrokenOff(f"what it sent is not HTTP: {error}"))
            self._close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self._open = False
        self._parser = None
        if self._head_complete and not self.complete and exc is None and self._ends_with_connection():
            self.complete = True
        elif self._head_complete:
            self._fail(BrokenOff("the connection ended"))
        else:
            self._fail(Disconnected())
        self._wake()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol.pause_writing`."""
        self._writable = False

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol.resume_writing`."""
        self._writable = True
        self._wake()

    def _fail(self, error: Exception) -> None:
        if not self.complete and self._error is None:
            self._error = error

    def _ends_with_connection(self) -> bool:
        """Whether the response has no length, so that its body is all that comes."""
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in self.headers
        )

    # The parser's callbacks

    def on_message_begin(self) -> None:
        """A response starts."""
        if self.complete or not self._method:
            raise BrokenOff("it sent a response that was not requested")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the response. Those after a chunked body are dropped."""
        if not self._head_complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of the response is complete."""
        assert self._parser is not None  # it calls
        status = self._parser.get_status_code()
        if not 100 <= status < 600 or status == 101:  # no request asks for another protocol
            raise BrokenOff(f"its status is {status}")
        self._informational = status < 200
        if self._informational:
            return
        self.status = status
        self._head_complete = True
        if self._method == "HEAD":
            self.complete = True  # the parser waits for a body: the connection cannot be used again

    def on_body(self, body: bytes) -> None:
        """Bytes of the body."""
        self._pieces.append(body)
        self._buffered += len(body)
        if self._reading and self._buffered > _MOST_BUFFERED and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The response is complete."""
        if self._informational or self.complete:
            return
        self.complete = True
        self._keeps_alive = self._parser is not None and self._parser.should_keep_alive()
