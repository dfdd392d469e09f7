"""Limits of the proxy's sockets: time and size of request heads, lingering bodies.

uvicorn has no such limits with its parser httptools, so its protocol is subclassed; how requests are parsed
and served stays uvicorn's.
"""

import asyncio
import logging
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenproxy.settings import Settings
from tokenproxy.web.gate import HEAD_LIMIT_BYTES

log = logging.getLogger("tokenproxy")

HEAD_TIMEOUT_S = 10.0
"""How long the request line and headers may take to arrive, from the opening of the connection or their first
byte."""
LINGER_S = 10.0
"""How long the rest of a body is read and discarded after the response. A client that sends the whole body
before it reads the response would lose the response if the connection were closed with bytes unread."""

UNSENT_BYTES = 128 * 1024
"""Bytes that the kernel takes for a client before it has sent those that came before. What a client that does
not read has in the kernel, megabytes by default, passed through the proxy and is kept for the record."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits; it refuses what exceeds them and closes the connection."""

    cycle: Any
    """uvicorn's newest request and response; None before the first."""
    _timer: asyncio.TimerHandle | None = None
    _head_size = 0
    _in_body = False
    """Whether the next byte belongs to the body of a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _limit_unsent(transport)
        self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._serves():
            self._stop()
            self._head_size = 0
            return
        if self._in_body:
            return  # the rest of a request that already has its response: the connection lingers
        self._head_size += len(data)
        if self._head_size > HEAD_LIMIT_BYTES:
            self._refuse("431 Request Header Fields Too Large")
        elif self._timer is None:
            self._start(HEAD_TIMEOUT_S, self._head_is_late)

    def on_headers_complete(self) -> None:
        """The parser's callback after a head."""
        super().on_headers_complete()
        self._in_body = True

    def on_message_complete(self) -> None:
        """The parser's callback after a body."""
        super().on_message_complete()
        self._in_body = False

    def on_response_complete(self) -> None:
        """uvicorn's callback after a response."""
        super().on_response_complete()
        self._head_size = 0
        if self._in_body and not self._serves() and not self.transport.is_closing():
            self._start(LINGER_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _serves(self) -> bool:
        """Whether a request is being served whose head is complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _head_is_late(self) -> None:
        if self._head_size:
            self._refuse("408 Request Timeout")
        else:
            self._close()

    def _refuse(self, status: str) -> None:
        """Close the connection with a response to a request that was not read."""
        if not self.transport.is_closing():
            head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head.encode())
        self._close()

    def _close(self) -> None:
        self._stop()
        self.transport.close()

    def _start(self, seconds: float, then: Any) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _limit_unsent(transport: asyncio.BaseTransport) -> None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn's configuration for accepting connections."""
    return {
        "http": GuardedProtocol,
        # No route takes WebSockets, and the limits would not apply to a connection that became one
        "ws": "none",
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }


def raise_file_limit() -> None:
    """Raise the soft limit of open sockets, which mostly is 1024, to the hard one."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS: the kernel's own limit is lower than `unlimited`
        log.warning("the limit of open files stays at %d: %s", soft, error)
    else:
        log.info("the limit of open files is raised from %d to %d", soft, hard)
