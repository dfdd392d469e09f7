"""Engines as processes, so that a test can kill them as an operating system does, and clients."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_ROOT = Path(__file__).parents[2]
_LISTENS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_PATIENCE_S = 60.0
CHAT = "/v1/chat/completions"


class KillableEngine:
    """A fake engine. Leaving the block kills it."""

    def __init__(self, model: Path, seconds: float) -> None:
        self._command = [sys.executable, "-m", "tests.support.engine_process", "--model", str(model)]
        self._command += ["--seconds", str(seconds)]
        self.port = 0

    def __enter__(self) -> "KillableEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def start(self) -> None:
        """Start it, on the port that it had before, and wait until it listens."""
        command = [*self._command, "--port", str(self.port)]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine did not start"
        self.port = int(line)

    async def wait_busy(self, requests: int) -> None:
        """Wait until so many requests run on it."""
        begun = time.monotonic()
        async with aiohttp.ClientSession(self.url) as session:
            while True:
                async with session.get("/running") as response:
                    if await response.json() >= requests:
                        return
                await _pause(begun)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


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

    async def __aenter__(self) -> "Clients":
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(self._url, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, number: int, text: str = "Hi") -> None:
        """Send one request, every other one as a stream. No two requests are equal."""
        content = f"{text} {number} {time.monotonic_ns()}"
        body = {"messages": [{"role": "user", "content": content}], "stream": number % 2 == 0}
        received = b""
        try:
            async with self._session.post(CHAT, json=body) as response:
                async for chunk in response.content.iter_any():
                    received += chunk
        except aiohttp.ClientError as error:
            self._ended(200 if received else 0, received, type(error).__name__)
        else:
            self._ended(response.status, received, received[:120].decode(errors="replace"))

    async def repeat(self, number: int, until: Callable[[], bool]) -> None:
        """Send requests one after the other."""
        while not until():
            await self.ask(number)

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


def in_thread(work: Callable[[], object]) -> Awaitable[object]:
    """Run what blocks, while the clients go on."""
    return asyncio.get_running_loop().run_in_executor(None, work)
