"""A client cheap enough not to be what is measured: raw sockets, canned requests, answers only counted."""

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


class BadAnswer(Exception):
    """An answer is not what the engine sent."""


class Framing:
    """Finds the end of an HTTP answer. Keeps the head and the last bytes, nothing between."""

    def __init__(self) -> None:
        self._head = b""
        self._left: int | None = None
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Whether the answer is complete with `data`.

        Raises:
            BadAnswer: its status is not 200.
        """
        if not self._tail and self._left is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return False
            if not self._head.startswith(b"HTTP/1.1 200"):
                raise BadAnswer(self._head[:500].decode("latin-1"))
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
            raise BadAnswer("the connection was closed in the middle of an answer")
        return data


def latencies(ports: Sequence[int], request: bytes, samples: int, warm_up: int = 5) -> list[list[float]]:
    """Milliseconds of `samples` requests to each port, taken in turns so that a machine that slows down
    slows all of them."""
    connections = [Latency(port) for port in ports]
    try:
        rounds = [[c.measure(request) for c in connections] for _ in range(warm_up + samples)]
    finally:
        for connection in connections:
            connection.close()
    return [list(column) for column in zip(*rounds[warm_up:], strict=True)]


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of some seconds of load."""

    requests: int
    seconds: float
    """Until the last answer."""
    p99_ms: float
    """How long the slowest hundredth of the requests waited at least."""


def throughput(port: int, request: bytes, connections: int, seconds: float) -> Answered:
    """Keep `connections` requests under way for `seconds`: each connection asks at least once, and the
    last answers are waited for.

    Raises:
        BadAnswer: a status is not 200, or a connection was closed.
    """
    return uvloop.run(_drive(port, request, connections, seconds))


async def _drive(port: int, request: bytes, connections: int, seconds: float) -> Answered:
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: _Client(request), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    start = time.perf_counter()
    for client in clients:
        client.start(start + seconds)
    taken = sorted(chain.from_iterable(await asyncio.gather(*(client.done for client in clients))))
    return Answered(len(taken), time.perf_counter() - start, 1000 * taken[len(taken) * 99 // 100])


class _Client(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        """The seconds that each request took."""
        self._request = request
        self._taken: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def start(self, deadline: float) -> None:
        """Ask until `deadline`, a time of `time.perf_counter`."""
        self._deadline = deadline
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Ask again once the answer is complete, or be done."""
        try:
            complete = self._framing.feed(data)
        except BadAnswer as error:
            self.done.set_exception(error)
            self._transport.close()
            return
        if not complete:
            return
        now = time.perf_counter()
        self._taken.append(now - self._asked)
        if now < self._deadline:
            self._ask()
        else:
            self.done.set_result(self._taken)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, unless done."""
        if not self.done.done():
            self.done.set_exception(BadAnswer(f"the connection was closed in the middle of an answer: {exc}"))

    def _ask(self) -> None:
        self._framing = Framing()
        self._asked = time.perf_counter()
        self._transport.write(self._request)


def check_same(case: Case, direct: int, proxy: int) -> None:
    """Ask both once, properly.

    Raises:
        BadAnswer: the proxy's answer is not the engine's.
    """
    status, body = _fetch(case, proxy)
    if (status, body) != _fetch(case, direct) or status != 200:
        raise BadAnswer(f"{case.name}: the proxy answers {status} {body[:300]!r}, not what the engine sent")


def _fetch(case: Case, port: int) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", case.path, case.payload(), case.headers())
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
