"""The connections of a server: the limits of what a client may send, and what ends a connection.

uvicorn has no limits of time and size of request heads and of lingering bodies with its parser httptools, so
its protocol is subclassed; how requests are parsed and served stays uvicorn's. Where a balancer sends the
requests of several clients over one connection, both must agree where each request ends. So:

1. An upgrade, which no route takes, is ignored (RFC 9110, section 7.8). httptools ends a request with an
   upgrade after its head, although a body follows: the head is parsed again without the `Upgrade` header.
2. Trailers are dropped: a balancer that checks headers may not check trailers (RFC 9110, section 6.5.1).
3. What cannot be parsed ends the connection, and gets a response only if the client waits for no other one.
4. After `Expect: 100-continue` the connection ends with the response: the client may not have sent its body.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenproxy.settings import Settings
from tokenproxy.web.gate import HEAD_LIMIT_BYTES

HEAD_TIMEOUT_S = 10.0
"""How long the request line and headers may take to arrive, from the opening of the connection or their first
byte."""
LINGER_S = 10.0
"""How long the rest of a body is read and discarded after the response. A client that sends the whole body
before it reads the response would lose the response if the connection were closed with bytes unread."""

_GRACE_S = 0.002
"""So long after a timeout a connection ends: for one more pass of the event loop."""

UNSENT_BYTES = 128 * 1024
"""Bytes that the kernel takes for a client before it has sent those that came before. What a client that does
not read has in the kernel, megabytes by default, passed through the proxy and is kept for the record."""
_NOTSENT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS


class _Lingering:
    """The transport of a connection. `close` first lets the client send the rest of its request and read the
    response: a connection that is closed with bytes unread is reset, and the response is lost."""

    def __init__(self, transport: asyncio.Transport, protocol: "GuardedProtocol") -> None:
        self._transport = transport
        self._protocol = protocol
        self.write: Callable[[bytes], None] = transport.write
        self.lingers = False
        """Whether nothing more is sent, and what comes is discarded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport.is_closing`."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close at once where no body is awaited, or at the second call; else wait for the client."""
        if self.is_closing() or not self._protocol.awaits_body:
            self._transport.close()
            return
        self.lingers = True
        self.write = _discard  # a request whose body is malformed has its response, and still runs
        self._protocol.linger()
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()


def _discard(data: bytes) -> None:
    """Writes nothing."""


class _PipelineFlow(FlowControl):
    """Reads nothing while a complete request waits for the response of the one before it."""

    def __init__(self, protocol: "GuardedProtocol", transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        """See `FlowControl.resume_reading`; a running request calls it to notice that its client left."""
        if not self._protocol.pipeline:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits; it refuses what exceeds them and closes the connection."""

    cycle: Any
    """uvicorn's newest request and response; None before the first."""
    _timer: asyncio.TimerHandle | None = None
    _head_size = 0
    """Bytes since the last complete head, piece of a body, or message."""
    _progress = False
    """Whether the bytes that are parsed completed any of these."""
    awaits_body = False
    """Whether the next byte belongs to the body of a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lingering: Any = _Lingering(transport, self)
        super().connection_made(lingering)
        self.flow = _PipelineFlow(self, lingering)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6) and _NOTSENT:
            connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT, UNSENT_BYTES)
        self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._progress = False
        self._parse(data)
        self._head_size = 0 if self._progress else self._head_size + len(data)
        if self._head_size > HEAD_LIMIT_BYTES:
            self._refuse("431 Request Header Fields Too Large")
        elif self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None and not self.awaits_body:  # else: the rest of an answered request
            self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse("405 Method Not Allowed")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self._refuse("400 Bad Request")
                return

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has just read, as bytes, without its `Upgrade` headers."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's callback after a header, or after a trailer, which is dropped."""
        if not self.awaits_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser's callback after a head."""
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self.expect_100_continue:
            self.cycle.keep_alive = False
        self.awaits_body = self._progress = True

    def on_body(self, body: bytes) -> None:
        """The parser's callback after a piece of a body."""
        super().on_body(body)
        self._progress = True

    def on_message_complete(self) -> None:
        """The parser's callback after a body."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.awaits_body = False
        self._progress = True

    def on_response_complete(self) -> None:
        """uvicorn's callback after a response."""
        super().on_response_complete()
        self._head_size = 0
        if self.awaits_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start(LINGER_S, self.transport.abort)

    def linger(self) -> None:
        """Discard what the client still sends, for a while."""
        self.flow.resume_reading()
        self._start(LINGER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _head_is_late(self) -> None:
        if self._head_size:
            self._refuse("408 Request Timeout")
        else:
            self._close()

    def _refuse(self, status: str) -> None:
        """Close the connection, with a response to what was not read if the client waits for no other."""
        if not self.transport.is_closing() and self._responds_next():
            head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head.encode())
        self._close()

    def _responds_next(self) -> bool:
        if self.cycle is None or self.pipeline:
            return self.cycle is None
        if self.awaits_body:
            return not self.cycle.response_started
        return bool(self.cycle.response_complete)

    def _close(self) -> None:
        self._stop()
        self.transport.close()

    def _start(self, seconds: float, then: Any) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._run_after_reading, then)

    def _run_after_reading(self, then: Any) -> None:
        """Let a loop that was blocked read first what arrived in time."""
        self._timer = asyncio.get_running_loop().call_later(_GRACE_S, then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn's configuration for accepting connections."""
    return {
        "http": GuardedProtocol,
        # No route takes WebSockets, and the limits would not apply to a connection that became one
        "ws": "none",
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
