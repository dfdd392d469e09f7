"""The time that a body may take: `body_timeout_s`, and longer for one that arrives fast enough."""

import asyncio
from collections.abc import Iterator

import pytest

from proxy.errors import BodyTimeout
from proxy.routes.endpoint import BODY_BYTES_PER_S, read_body

_SCOPE = {"type": "http", "headers": []}


class _Client:
    """Sends pieces of a body, `seconds` after each other by its own clock, and then nothing any more."""

    def __init__(self, pieces: list[bytes], seconds: float, *, ends: bool) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._messages: Iterator[dict[str, object]] = iter(
            {"type": "http.request", "body": piece, "more_body": not (ends and index == len(pieces) - 1)}
            for index, piece in enumerate(pieces)
        )

    async def receive(self) -> dict[str, object]:
        self.now += self._seconds
        await asyncio.sleep(0)  # a time that is over cancels here
        for message in self._messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")

    def clock(self) -> float:
        return self.now


async def test_a_long_body_that_is_fast_enough() -> None:
    client = _Client([b"a" * BODY_BYTES_PER_S] * 10, 0.9, ends=True)
    body = await read_body(_SCOPE, client.receive, 2**30, 1.0, client.clock)
    assert len(body) == 10 * BODY_BYTES_PER_S


async def test_a_body_that_becomes_too_slow() -> None:
    client = _Client([b"a" * BODY_BYTES_PER_S] * 10, 1.2, ends=False)
    with pytest.raises(BodyTimeout, match="within 1 s"):
        await read_body(_SCOPE, client.receive, 2**30, 1.0, client.clock)
