"""The client of all benchmarks: raw sockets that cost little CPU, and conversations as agents hold them."""

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import msgspec
import uvloop

CHAT, TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
MODEL = "bench"
HEADERS = {
    # those of the OpenAI SDK, because headers are a large part of the cost of a small request; but without
    # accept-encoding: no gateway is to spend its time with compressing
    "host": "127.0.0.1",
    "connection": "keep-alive",
    "accept": "application/json",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.25.0",
    "x-stainless-lang": "python",
    "x-stainless-package-version": "2.25.0",
    "x-stainless-os": "Linux",
    "x-stainless-arch": "x64",
    "x-stainless-runtime": "CPython",
    "x-stainless-runtime-version": "3.11.7",
    "authorization": "Bearer none",
    "x-stainless-async": "async:asyncio",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}
_READ = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_FRAMING = re.compile(rb"\r\n[0-9a-f]+\r\n", re.IGNORECASE)  # between the chunks of HTTP: parts of events


class BadResponse(Exception):
    """A response is an error, is cut off, or is not the one that was expected."""


def http_request(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A POST request as bytes, with `HEADERS` and more."""
    lines = [f"POST {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **(headers or {})}.items()]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


class Response:
    """A response, fed with received bytes until it is complete."""

    def __init__(self) -> None:
        self.head = b""
        self.start_ns, self.end_ns = time.perf_counter_ns(), 0
        """From before the request is sent to the last byte; CLOCK_MONOTONIC."""
        self._parts: list[bytes] = []
        self._left: int | None = None
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Add received bytes; returns whether the response is complete.

        Raises:
            BadResponse: the response's status is not 200.
        """
        if not self._tail:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return False
            if not self.head.startswith(b"HTTP/1.1 200"):
                raise BadResponse(self.head[:700].decode("latin-1"))
            data, self.head = self.head[end + 4 :], self.head[: end + 2]
            length = _LENGTH.search(self.head)
            self._left, self._tail = int(length[1]) if length else None, b"\r\n"
        self._parts.append(data)
        if self._left is not None:
            self._left -= len(data)
            complete = self._left <= 0
        else:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            complete = self._tail == _LAST_CHUNK
        if complete:
            self.end_ns = time.perf_counter_ns()
        return complete

    @property
    def seconds(self) -> float:
        """From before the request was sent to the last byte of the response."""
        return (self.end_ns - self.start_ns) / 1e9

    def header(self, name: str) -> str:
        """The value of a header; empty if there is none."""
        found = re.search(rb"\r\n%b: *([^\r]*)" % name.encode(), self.head, re.IGNORECASE)
        return found[1].decode() if found else ""

    @property
    def body(self) -> bytes:
        """The body; of a stream, with the framing of its chunks."""
        return b"".join(self._parts)

    def choices(self) -> Iterator[dict[str, Any]]:
        """The choices of a chat completion, or of all chunks of a stream.

        Raises:
            BadResponse: it is none.
        """
        events = [self.body]
        if self._left is None:
            lines = _FRAMING.sub(b"", b"\r\n" + self.body).splitlines()
            events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
        for event in events:
            try:
                yield from msgspec.json.decode(event)["choices"]
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                raise BadResponse(f"no chat completion: {event[:200]!r}") from error


class Line:
    """One kept-alive connection for one request at a time, without an event loop."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> Response:
        """Send a request and read the response.

        Raises:
            BadResponse: the status is not 200, or the connection was closed.
        """
        response = Response()
        self._socket.sendall(request)
        while not response.feed(data := self._socket.recv(_READ)):
            if not data:
                raise BadResponse("the connection was closed in the middle of a response")
        return response

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Connection(asyncio.Protocol):
    """One kept-alive connection of many. Open it with `connect`."""

    @classmethod
    async def connect(cls, port: int) -> "Connection":
        """Open a connection."""
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it
        self._done: Callable[[Response | BadResponse], None] | None = None

    def send(self, request: bytes, done: Callable[[Response | BadResponse], None]) -> None:
        """Send a request; `done` gets its response, or why there is none."""
        self._done, self._response = done, Response()
        self._transport.write(request)

    async def exchange(self, request: bytes) -> Response:
        """Send a request and wait for its response.

        Raises:
            BadResponse: the status is not 200, or the connection was closed.
        """
        answered = asyncio.get_running_loop().create_future()

        def done(response: Response | BadResponse) -> None:
            if not answered.done():
                answered.set_result(response)

        self.send(request, done)
        response: Response | BadResponse = await answered
        if isinstance(response, BadResponse):
            raise response
        return response

    def data_received(self, data: bytes) -> None:
        """Hand the response over when it is complete."""
        try:
            if self._response.feed(data):
                self._end(self._response)
        except BadResponse as error:
            self._end(error)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if a response is awaited."""
        self._end(BadResponse(f"the connection was closed in the middle of a response: {exc}"))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def _end(self, response: Response | BadResponse) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(response)


def load(port: int, requests: Iterable[bytes], connections: int, seconds: float) -> tuple[list[float], float]:
    """Keep `connections` requests in flight for `seconds`, then wait for the last responses. Each connection
    sends at least one request; together they take the requests in their order.

    Returns: the latencies in seconds, and the time until the last response.

    Raises:
        BadResponse: a status is not 200, or a connection was closed.
    """
    return uvloop.run(_load(port, iter(requests), connections, seconds))


async def _load(
    port: int, requests: Iterator[bytes], connections: int, seconds: float
) -> tuple[list[float], float]:
    opened = [await Connection.connect(port) for _ in range(connections)]
    start = time.perf_counter()
    try:
        taken = await asyncio.gather(*(_flood(each, requests, start + seconds) for each in opened))
        elapsed = time.perf_counter() - start
    finally:
        for each in opened:
            each.close()
    return list(chain.from_iterable(taken)), elapsed


def _flood(
    connection: Connection, requests: Iterator[bytes], deadline: float
) -> "asyncio.Future[list[float]]":
    """Send the next request as soon as a response is complete; returns the latencies in seconds."""
    ended: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
    latencies: list[float] = []

    def done(response: Response | BadResponse) -> None:
        if ended.done():
            return
        if isinstance(response, BadResponse):
            ended.set_exception(response)
            return
        latencies.append(response.seconds)
        if time.perf_counter() < deadline:
            connection.send(next(requests), done)
        else:
            ended.set_result(latencies)

    connection.send(next(requests), done)
    return ended


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of a rollout."""

    pause_s: float
    """Before its request: the time of a tool."""
    text: str
    """Of the message before it: the tool's result, or the user's. Not used for the first turn."""
    max_tokens: int


@dataclass(slots=True)
class Tally:
    """What the clients of rollouts saw."""

    latencies_s: list[float] = field(default_factory=list)
    """Of each turn, in the order of the responses."""
    begun: int = 0
    """Rollouts with a response."""
    extended: int = 0
    """Turns for whose prompt the proxy continued recorded ids."""
    seconds: float = 0.0
    """From the first request to the last response."""
    cut: bool = False
    """Whether the time was up before the last response."""
    errors: list[str] = field(default_factory=list)
    """Why rollouts ended early."""


class Rollout:
    """A conversation of a plain OpenAI client: it sends all messages in every request."""

    def __init__(
        self,
        opening: Iterable[dict[str, Any]],
        steps: Iterable[Step] = (),
        *,
        session: str | None = None,
        **fields: Any,
    ) -> None:
        """A rollout that has not begun.

        Args:
            session: its name, if the client names it.
            fields: more fields of each request.
        """
        self.messages = list(map(msgspec.json.encode, opening))
        self._steps = steps
        self.session = session
        self.headers = {"x-session-id": session} if session else {}
        self._fields = fields
        self._result: Callable[[str], dict[str, Any]] | None = None

    def branch(self) -> "Rollout":
        """The same conversation, to be continued in another way."""
        other = copy(self)
        other.messages = list(self.messages)
        return other

    def request(self, **more: Any) -> bytes:
        """The request for the next turn."""
        messages = msgspec.Raw(b"[" + b",".join(self.messages) + b"]")
        fields = {"model": MODEL, "messages": messages, **self._fields, **more}
        return http_request(CHAT, msgspec.json.encode(fields), self.headers)

    def add(self, response: Response) -> None:
        """Append the response's message."""
        (choice,) = response.choices()
        message = {name: value for name, value in choice["message"].items() if value}
        calls = message.get("tool_calls")
        self._result = (
            (lambda text: {"role": "tool", "tool_call_id": calls[0]["id"], "content": text})
            if calls
            else None
        )
        self.messages.append(msgspec.json.encode(message))

    def reply(self, text: str) -> None:
        """Append a message to that: the result of its tool call, or else the user's."""
        message = self._result(text) if self._result else {"role": "user", "content": text}
        self.messages.append(msgspec.json.encode(message))

    async def take(self, connection: Connection, tally: Tally) -> None:
        """Take all turns.

        Raises:
            BadResponse: a status is not 200, or the connection was closed.
        """
        for number, step in enumerate(self._steps):
            if number:
                self.reply(step.text)
            request = self.request(max_tokens=step.max_tokens)
            await asyncio.sleep(step.pause_s)
            response = await connection.exchange(request)
            tally.latencies_s.append(response.seconds)
            tally.begun += number == 0
            tally.extended += response.header("x-prompt-source") == "extended"
            self.add(response)


async def hold(
    port: int,
    rollouts: Iterable[Rollout],
    connections: int,
    tally: Tally,
    *,
    limit_s: float | None = None,
    patient: bool = False,
    finish: Callable[[Rollout], bytes] | None = None,
) -> None:
    """Hold rollouts, `connections` at a time, until there are no more or the time is up.

    Args:
        patient: go on with another rollout after an error.
        finish: a request to send after each rollout.

    Raises:
        BadResponse: a status is not 200, or a connection was closed.
    """
    waiting, start = iter(rollouts), time.perf_counter()

    async def client() -> None:
        for rollout in waiting:
            connection = await Connection.connect(port)
            try:
                await rollout.take(connection, tally)
                if finish is not None:
                    await connection.exchange(finish(rollout))
            except BadResponse as error:
                if not patient:
                    raise
                tally.errors.append(str(error))
            finally:
                connection.close()

    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*(client() for _ in range(connections)))
    except TimeoutError:
        tally.cut = True
    tally.seconds = time.perf_counter() - start
