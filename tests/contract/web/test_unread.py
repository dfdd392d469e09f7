"""Responses that their clients do not read: the rest waits in files, and what is read later is whole."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile

import pytest

from tokenproxy.base.http import BytesResponse
from tokenproxy.base.types import Message
from tokenproxy.web import response as sending
from tokenproxy.web.response import PIECE_BYTES, send_response


class _Bytes(bytes):
    """Bytes that report when nobody holds them any more."""

    freed: Callable[[], object]

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop of a test that failed is closed
            self.freed()


def _full(*args: object, **kwargs: object) -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize("size", [0, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7])
@pytest.mark.parametrize("file", [TemporaryFile, _full])
async def test_a_large_response_waits_outside_of_memory_and_arrives_whole(
    size: int, file: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "UNREAD_S", 0.0)
    monkeypatch.setattr(sending, "TemporaryFile", file)
    expected = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    body, reads, sent = _Bytes(expected), asyncio.Event(), list[Message]()
    loop = asyncio.get_running_loop()
    body.freed = lambda: loop.call_soon_threadsafe(reads.set)  # a thread may be the last that holds it
    response = BytesResponse(200, [], body)
    del body

    async def send(message: Message) -> None:
        sent.append(message)
        if size > PIECE_BYTES and message.get("more_body") and len(sent) == 2:
            await reads.wait()  # the client reads once the proxy holds the body no more

    await asyncio.wait_for(send_response(response, send), 10)
    assert sent[0]["headers"] == [(b"content-length", b"%d" % size)]
    assert b"".join(message["body"] for message in sent[1:]) == expected
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert all(len(message["body"]) <= PIECE_BYTES for message in sent[1:])
