"""A load generator that costs little CPU: raw sockets, canned requests, responses that are not parsed."""

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import chain
from typing import cast

import uvloop

from benchmarks.cases import Case

_READ = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class BadResponse(Exception):
    """A response is an error, is cut off, or differs from the engine's."""


class Framing:
    """Finds the end of an HTTP response. Keeps only its head and its last bytes."""

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = None
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Add received bytes; returns whether the response is complete.

        Raises:
            BadResponse: the response's status is not 200.
        """
        if not self._tail and self._left is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return False
            if not self._head.startswith(b"HTTP/1.1 200"):
                raise BadResponse(self._head[:500].decode("latin-1"))
            length = _LENGTH.search(self._head, 0, end + 2)
            data = self._head[end + 4 :]
            self._left = int(length[1]) if length else None
            self._tail = b"\r\n"
        if self._left is not None:
            self._left -= len(data)
            return self._left <= 0
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        return self._tail == _LAST_CHUNK


class Latency:
    """One kept-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def measure(self, request: bytes) -> float:
        """Milliseconds from the first byte sent to the last byte received."""
        framing = Framing()
        start = time.perf_counter_ns()
        self._socket.sendall(request)
        while not framing.feed(self._receive()):
            pass
        return (time.perf_counter_ns() - start) / 1e6

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self) -> bytes:
        data = self._socket.recv(_READ)
        if not data:
            raise BadResponse("the connection was closed in the middle of a response")
        return data


def latencies(ports: Sequence[int], request: bytes, samples: int, warm_up: int = 5) -> list[list[float]]:
    """Milliseconds of `samples` requests to each port. The ports alternate, so that a slow machine
    affects all of them."""
    connections = [Latency(port) for port in ports]
    try:
        rounds = [[c.measure(request) for c in connections] for _ in range(warm_up + samples)]
    finally:
        for connection in connections:
            connection.close()
    return [list(column) for column in zip(*rounds[warm_up:], strict=True)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of some seconds of load."""

    requests: int
    seconds: float
    """Time until the last response."""
    p99_ms: float
    """The 99th percentile of the latencies."""


def throughput(port: int, request: bytes, connections: int, seconds: float) -> LoadResult:
    """Keep `connections` requests in flight for `seconds`, then wait for the last responses. Each connection
    sends at least one request.

    Raises:
        BadResponse: a status is not 200, or a connection was closed.
    """
    return uvloop.run(_drive(port, request, connections, seconds))


async def _drive(port: int, request: bytes, connections: int, seconds: float) -> LoadResult:
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: _Client(request), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    start = time.perf_counter()
    for client in clients:
        client.start(start + seconds)
    taken = sorted(chain.from_iterable(await asyncio.gather(*(client.done for client in clients))))
    return LoadResult(len(taken), time.perf_counter() - start, 1000 * taken[len(taken) * 99 // 100])


class _Client(asyncio.Protocol):
    """One connection that sends the next request as soon as a response is complete."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        """The latencies of all requests in seconds, once the connection is done."""
        self._request = request
        self._latencies: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def start(self, deadline: float) -> None:
        """Send requests until `deadline`, a value of `time.perf_counter`."""
        self._deadline = deadline
        self._send()

    def data_received(self, data: bytes) -> None:
        """When the response is complete, send the next request, or end after the deadline."""
        try:
            complete = self._framing.feed(data)
        except BadResponse as error:
            self.done.set_exception(error)
            self._transport.close()
            return
        if not complete:
            return
        now = time.perf_counter()
        self._latencies.append(now - self._sent_at)
        if now < self._deadline:
            self._send()
        else:
            self.done.set_result(self._latencies)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, unless the deadline has passed."""
        if not self.done.done():
            self.done.set_exception(
                BadResponse(f"the connection was closed in the middle of a response: {exc}")
            )

    def _send(self) -> None:
        self._framing = Framing()
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


def check_same(case: Case, direct: int, proxy: int) -> None:
    """Send one request to both ports with a standard HTTP client, and compare the responses.

    Raises:
        BadResponse: the proxy's response is not the engine's.
    """
    status, body = _fetch(case, proxy)
    if (status, body) != _fetch(case, direct) or status != 200:
        raise BadResponse(
            f"{case.name}: the proxy returned {status} {body[:300]!r}, not the engine's response"
        )


def _fetch(case: Case, port: int) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", case.path, case.payload(), case.headers())
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
