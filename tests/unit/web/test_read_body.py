"""The time that a body may take: `BODY_TIMEOUT_S`, and longer for one that arrives fast enough."""

import asyncio

import pytest

from tokenproxy.base.errors import BodyTimeout
from tokenproxy.web.endpoint import BODY_BYTES_PER_S, read_body

_SCOPE = {"type": "http", "headers": []}


class _Client:
    """Sends ten pieces of a body, `seconds` after each other by its own clock."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds, self._sent = 0.0, seconds, 0

    async def receive(self) -> dict[str, object]:
        self.now += self._seconds
        self._sent += 1
        await asyncio.sleep(0.02)  # a time that is over cancels here
        return {"type": "http.request", "body": b"a" * BODY_BYTES_PER_S, "more_body": self._sent < 10}

    def clock(self) -> float:
        return self.now


async def test_a_long_body_that_is_fast_enough() -> None:
    client = _Client(0.9)
    body = await read_body(_SCOPE, client.receive, 2**30, 1.0, client.clock)
    assert len(body) == 10 * BODY_BYTES_PER_S


async def test_a_body_that_becomes_too_slow() -> None:
    client = _Client(1.2)
    with pytest.raises(BodyTimeout, match="within 1 s"):
        await read_body(_SCOPE, client.receive, 2**30, 1.0, client.clock)
