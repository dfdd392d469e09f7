"""Limits of the proxy's sockets: time and size of request heads, lingering bodies, connections per address.

uvicorn has limits for none of these but the size of a head under h11. Its two HTTP protocols are subclassed
where both have the same methods; how requests are parsed and served stays uvicorn's.
"""

import asyncio
import logging
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.settings import Settings

log = logging.getLogger("tokenproxy")

LINGER_S = 10.0
"""How long the rest of a body is read and discarded after the response. A client that sends the whole body
before it reads the response would lose the response if the connection were closed with bytes unread."""

UNSENT_BYTES = 128 * 1024
"""Bytes that the kernel takes for a client before it has sent those that came before. What a client that does
not read has in the kernel, megabytes by default, passed through the proxy and is kept for the record."""


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of one server, and the connections that are open now."""

    head_bytes: int
    head_timeout_s: float
    per_address: int
    """0 for any number."""
    open: Counter[str] = field(default_factory=Counter)
    """Open connections by address; kept only if they are limited."""


class _Guarded(asyncio.Protocol):
    """Adds the limits to a protocol of uvicorn; comes before it in the list of base classes."""

    limits: ConnectionLimits
    """Set by `guarded_protocol`, because uvicorn passes only its own arguments."""
    transport: Any
    cycle: Any
    """uvicorn's newest request and response; None before the first."""
    _address: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _head_size = 0

    def _reads_body(self) -> bool:
        """Whether the next byte belongs to the body of a request."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limits = self.limits
        _limit_unsent(transport)
        peer = transport.get_extra_info("peername")
        if limits.per_address and isinstance(peer, tuple):
            self._address = str(peer[0])
            limits.open[self._address] += 1
            if limits.open[self._address] > limits.per_address:
                self._refuse("503 Service Unavailable", b"retry-after: 1\r\n")
                return
        self._start(limits.head_timeout_s, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._serves():
            self._stop()
            self._head_size = 0
            return
        if self._reads_body():
            return  # the rest of a request that already has its response: the connection lingers
        self._head_size += len(data)
        if self._head_size > self.limits.head_bytes:
            self._refuse("431 Request Header Fields Too Large")
        elif self._timer is None:
            self._start(self.limits.head_timeout_s, self._head_is_late)

    def on_response_complete(self) -> None:
        """uvicorn's callback after a response."""
        super().on_response_complete()  # type: ignore[misc]
        self._head_size = 0
        if self._reads_body() and not self._serves() and not self.transport.is_closing():
            self._start(LINGER_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()
        if self._address is not None:
            self.limits.open[self._address] -= 1
            if not self.limits.open[self._address]:
                del self.limits.open[self._address]

    def _serves(self) -> bool:
        """Whether a request is being served whose head is complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _head_is_late(self) -> None:
        if self._head_size:
            self._refuse("408 Request Timeout")
        else:
            self._close()

    def _refuse(self, status: str, header: bytes = b"") -> None:
        """Close the connection with a response to a request that was not read."""
        if not self.transport.is_closing():
            head = f"HTTP/1.1 {status}\r\n".encode() + header
            self.transport.write(head + b"connection: close\r\ncontent-length: 0\r\n\r\n")
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


class _GuardedHttpTools(_Guarded, HttpToolsProtocol):
    """The parser calls back at each step of a request."""

    _in_body = False

    def _reads_body(self) -> bool:
        return self._in_body

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_body = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False


class _GuardedH11(_Guarded, H11Protocol):
    """The parser knows where in a request it is."""

    def _reads_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY


def guarded_protocol(parser: str, limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Create a class of uvicorn's protocol for a parser, `httptools` or `h11`, with limits.

    Each server gets its own class, because all connections of a class share its limits.
    """
    base = _GuardedHttpTools if parser == "httptools" else _GuardedH11
    return type(base.__name__, (base,), {"limits": limits})


def connection_options(settings: Settings) -> dict[str, Any]:
    """The options of uvicorn's configuration for accepting connections."""
    limits = ConnectionLimits(
        settings.head_limit_bytes, settings.head_timeout_s, settings.connections_per_address
    )
    return {
        "http": guarded_protocol(settings.http_parser, limits),
        "h11_max_incomplete_event_size": settings.head_limit_bytes,
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
