"""A stream in another format says something while the engine is silent, because clients give up."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.fake_vllm import error_body
from tests.unit.formats.chunks import TURN, chunk
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response
from tokenproxy.base.request import SessionRef
from tokenproxy.formats.base import NamedSession
from tokenproxy.formats.messages.answer import MessagesTranslation
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.responses.answer import ResponsesTranslation
from tokenproxy.formats.responses.request import read_request
from tokenproxy.formats.translated import Translation, serve_early
from tokenproxy.turn.answer import limit_answer
from tokenproxy.web.response import send_response

_SILENCE_S = 0.01


async def _store(name: str, content: bytes) -> bool:
    return True


def _responses() -> Translation:
    return ResponsesTranslation(read_request(b'{"input": "Hi", "stream": true}'), [], [], _store)


class _Engine:
    """A streamed turn whose response, and whose second chunk, wait for a test."""

    status = 200
    headers = ((b"content-type", b"text/event-stream"), (b"x-turn-id", TURN.encode()))
    closed = False

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self.responds, self.goes_on = asyncio.Event(), asyncio.Event()

    async def serve(self) -> Any:
        await self.responds.wait()
        self._translation.turn_id = TURN
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._translation.event(b"", chunk(content="a"))
        await self.goes_on.wait()
        yield self._translation.event(b"", chunk("stop", content="b")) + self._translation.end()

    async def aclose(self) -> None:
        self.closed = True


def _kinds(content: bytes) -> list[str]:
    lines = content.decode().split("\n")
    return [line.partition("event: ")[2] or line[2:] for line in lines if line.startswith(("event", ": "))]


@pytest.mark.parametrize(
    ("translation", "first", "alive", "last"),
    [(MessagesTranslation("claude"), "message_start", "ping", "message_stop"),
     (_responses(), "response.created", "keep-alive", "response.completed")],
    ids=["messages", "responses"],
)  # fmt: skip
async def test_a_stream_begins_before_its_engine_responds_and_is_kept_alive(
    translation: Translation, first: str, alive: str, last: str
) -> None:
    engine, sent = _Engine(translation), list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        kinds = _kinds(b"".join(sent))
        if kinds.count(alive) >= 1:
            engine.responds.set()
        if kinds.count(alive) >= 2:
            engine.goes_on.set()

    response = await serve_early(engine.serve, translation, _SILENCE_S)
    await send_response(response, send)
    await response.aclose()
    kinds = _kinds(b"".join(sent))
    assert (kinds[0], kinds[-1], kinds.count(first), engine.closed) == (first, last, 1, True)


async def test_an_error_after_the_start() -> None:
    responds = asyncio.Event()

    async def serve() -> Response:
        await responds.wait()
        return BytesResponse(400, list(JSON_HEADERS), error_body("no", "X", None, 400))

    response = await serve_early(serve, MessagesTranslation("claude"), 0)
    responds.set()
    content = await response.read()
    assert response.status == 200
    assert b'"type":"invalid_request_error","message":"no"' in content.split(b"\n\n")[-2]


async def test_a_retry_that_gets_an_earlier_stream_begins_once() -> None:
    earlier, responds = MessagesTranslation("claude"), asyncio.Event()
    body = earlier.event(b"", chunk("stop", content="a")) + earlier.end()

    async def serve() -> Response:
        await responds.wait()
        return BytesResponse(200, [(b"content-type", b"text/event-stream")], body)

    response = await serve_early(serve, MessagesTranslation("claude"), 0)
    responds.set()
    content = await response.read()
    assert _kinds(content) == _kinds(body) and content.split(b"\n\n")[1:] == body.split(b"\n\n")[1:]


async def test_a_final_message_past_a_limit_is_whole_after_the_start() -> None:
    body = b'{"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
    limited = NamedSession(SessionRef("s"), limit="turns")
    request = MessagesFormat().parse(Request("POST", "/v1/messages", body=body), limited)
    translation, responds = MessagesTranslation("claude"), asyncio.Event()

    async def serve() -> Response:
        await responds.wait()
        return await limit_answer(request, translation)

    response = await serve_early(serve, translation, 0)
    responds.set()
    content = await response.read()
    kinds = _kinds(content)
    block = [f"content_block_{part}" for part in ("start", "delta", "stop")]
    assert [each for each in kinds if each != "ping"] == [
        *("message_start", *block, "message_delta", "message_stop")
    ]
    assert b"The session has reached its limit (turns)" in content


async def test_a_client_that_leaves_before_the_engine_responds_ends_the_turn() -> None:
    ended = asyncio.Event()

    async def serve() -> Response:
        try:
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            ended.set()

    response = await serve_early(serve, MessagesTranslation("claude"), 0)
    await asyncio.sleep(0)
    await response.aclose()
    assert ended.is_set()
