"""Responses of odd engines over real sockets: what is read, and which connections are used again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.stepped import elapse, now, stepped
from tokenproxy.base.errors import EngineBroken, EngineTimeout
from tokenproxy.base.http import Request, Response
from tokenproxy.engine.http import HttpEngine

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def _engine(serve: Serve) -> Any:
    """An engine that serves each connection with a function."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(closing, "127.0.0.1", 0) as server:
        engine = HttpEngine(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", idle_timeout_s=60, clock=now
        )
        try:
            yield engine
        finally:
            await engine.aclose()


def _answering(*responses: bytes, close: bool = False) -> Serve:
    """Answers the requests of each connection with these bytes, in order."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for response in responses:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
            await writer.drain()
        if not close:
            await reader.read()

    return serve


async def _ask(engine: HttpEngine, method: str = "GET", body: bytes = b"") -> tuple[Response, bytes]:
    async with asyncio.timeout(100):
        response = await engine.send(Request(method, "/", [], body))
        try:
            return response, await response.read()
        finally:
            await response.aclose()


async def test_connection_whose_request_was_not_sent_whole_is_not_used_again() -> None:
    """The engine would take the next request for the rest of the body."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        if b"POST" not in head:
            writer.write(_OK)
            await reader.read()
            return
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.Event().wait()

    async with _engine(serve) as engine:
        refused, body = await _ask(engine, "POST", b"x" * 20_000_000)
        assert (refused.status, body) == (401, b"no")
        assert (await _ask(engine))[1] == b"ok"
    assert connections == 2


@pytest.mark.parametrize(
    "response, body",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + _OK, b"ok"),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b""),
        (_CHUNKED + b"2;extension=1\r\nok\r\n0\r\nset-cookie: a=b\r\n\r\n", b"ok"),
    ],
)
async def test_responses_that_leave_the_connection_open(response: bytes, body: bytes) -> None:
    async with _engine(_answering(response, _OK)) as engine:
        first, received = await _ask(engine)
        assert received == body
        assert not {b"set-cookie", b"link"} & {name for name, _ in first.headers}
        assert (await _ask(engine))[1] == b"ok"


@pytest.mark.parametrize("status", ["0", "000", "99", "101", "600", "999", "1000"])
async def test_a_status_that_no_response_has_is_an_error(status: str) -> None:
    odd = f"HTTP/1.1 {status} Odd\r\ncontent-length: 2\r\n\r\nok".encode()
    async with _engine(_answering(odd)) as engine:
        with pytest.raises(EngineBroken):
            await _ask(engine)


async def test_a_status_without_a_body_announces_none() -> None:
    for status in (b"204 No Content", b"304 Not Modified"):
        async with _engine(_answering(_OK.replace(b"200 OK", status))) as engine:
            response, body = await _ask(engine)
            assert (response.headers, body) == ([], b"")


@pytest.mark.parametrize(
    "response", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", _CHUNKED + b"2\r\nok\r\n"]
)
async def test_a_short_body_is_an_error(response: bytes) -> None:
    async with _engine(_answering(response, close=True)) as engine:
        with pytest.raises(EngineBroken, match="middle of its response"):
            await _ask(engine)


async def test_a_connection_with_bytes_left_over_is_not_used_again() -> None:
    async with _engine(_answering(_OK + _OK, b"HTTP/1.1 500 Wrong\r\ncontent-length: 0\r\n\r\n")) as engine:
        for _ in range(3):
            try:
                answer, body = await _ask(engine)
            except EngineBroken:
                continue  # what came after the response is no response to the request
            assert (answer.status, body) == (200, b"ok")


@pytest.mark.parametrize("held", [False, True])
@stepped
async def test_a_stream_may_pause_for_as_long_as_it_is_allowed_and_longer_while_the_fleet_is_held(
    held: bool,
) -> None:
    async def pause(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        for gap_s in (59.0, 100.0):
            await elapse(gap_s)
            writer.write(b"data: 2\n\n")

    async with _engine(pause) as engine:
        engine.suspended_seconds = now if held else (lambda: 0.0)
        response = await engine.send(Request("GET", "/"))
        chunks = response.chunks()
        for _ in range(2):
            assert (await anext(chunks)).startswith(b"data: ")
        if held:
            assert await anext(chunks) == b"data: 2\n\n"
        else:
            with pytest.raises(EngineTimeout):
                await anext(chunks)
        await response.aclose()


@stepped
async def test_a_body_that_is_no_stream_may_take_the_time_of_its_bytes() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n")
        for size in (200_000, 10, 10):
            writer.write(b"x" * size)
            await elapse(10.0)

    async with _engine(drip) as engine:
        response = await engine.send(Request("GET", "/"))
        received = 0
        with pytest.raises(EngineTimeout):
            async for chunk in response.chunks():
                received += len(chunk)
        assert received == 200_010, "15 s are allowed for so many bytes"
        await response.aclose()


async def test_the_second_address_is_tried_if_the_first_does_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _engine(_answering(_OK)) as engine:
        port = engine._port
        inet = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")

        async def resolve(host: str, port: int, **options: Any) -> list[Any]:
            return [(*inet, ("192.0.2.1", port)), (*inet, ("127.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        named = HttpEngine(f"http://engine.example:{port}", connect_timeout_s=3)
        assert (await _ask(named))[1] == b"ok"
        await named.aclose()
