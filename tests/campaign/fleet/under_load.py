"""A slow engine that can be killed, and many clients of the proxy before it."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.tiny_model import END, HI, TinyModel

_IDS = (*HI * 2, END)
_PATIENCE_S = 60.0


class KillableEngine(FakeVllm):
    """Each generation takes `seconds`; a stream sends its first event after a sixth of that."""

    def __init__(self, model: TinyModel, seconds: float) -> None:
        super().__init__(model)
        self._seconds = seconds
        # the head, and an event for each id
        self.usual = Reply(ids=_IDS, pause_s=seconds / (1 + len(_IDS)))

    async def _before(self, request: web.Request, reply: Reply, event: bytes) -> None:
        if event.startswith(b"data: ") or reply is not self.usual:
            await super()._before(request, reply, event)
        else:
            await asyncio.sleep(self._seconds)

    async def wait_busy(self, requests: int) -> None:
        """Wait until so many requests run on it."""
        begun = time.monotonic()
        while self.running < requests:
            await _pause(begun)


@dataclass
class Outcomes:
    """How requests ended."""

    answered: int = 0
    broke_off: int = 0
    """Streams that had begun."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that failed before anything of an answer came, by status and error."""


class Clients:
    """Many clients of the proxy."""

    def __init__(self, url: str) -> None:
        self.outcomes = Outcomes()
        self._url = url

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(self._url, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, number: int) -> None:
        """Send one request, every other one as a stream. No two requests are equal."""
        body = {"messages": [user(f"Hi {number} {time.monotonic_ns()}")], "stream": number % 2 == 0}
        received = b""
        try:
            async with self._session.post(CHAT, json=body) as response:
                async for chunk in response.content.iter_any():
                    received += chunk
        except aiohttp.ClientError as error:
            self._ended(200 if received else 0, received, type(error).__name__)
        else:
            self._ended(response.status, received, received[:120].decode(errors="replace"))

    async def seconds_until_gone(self, engine: int) -> float:
        """Seconds until the proxy reports that one engine gets no requests."""
        begun = time.monotonic()
        while (await self._ready())[engine]:
            await _pause(begun)
        return time.monotonic() - begun

    async def seconds_until_all_ready(self) -> float:
        """Seconds until the proxy reports that all engines get requests."""
        begun = time.monotonic()
        while not all(await self._ready()):
            await _pause(begun)
        return time.monotonic() - begun

    async def _ready(self) -> list[bool]:
        async with self._session.get("/ready") as response:
            engines: list[dict[str, Any]] = (await response.json())["engines"]
            return [engine["ready"] for engine in engines]

    def _ended(self, status: int, received: bytes, problem: str) -> None:
        whole = received.rstrip().endswith((b"}", b"data: [DONE]")) and b'"error"' not in received
        if status == 200 and whole:
            self.outcomes.answered += 1
        elif status == 200 and received.startswith(b"data: "):
            self.outcomes.broke_off += 1
        else:
            self.outcomes.failed[f"{status} {problem}"] += 1


async def _pause(begun: float) -> None:
    if time.monotonic() - begun > _PATIENCE_S:
        raise TimeoutError("waited in vain")
    await asyncio.sleep(0.02)
