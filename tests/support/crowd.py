"""Many conversations at once with a proxy in a process of its own, and what it must have recorded of them."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.recorded import record_of
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT, Answered, Message, user

_PATIENCE_S = 60.0


@contextmanager
def run_proxy_process(engine: FakeVllm, store: str, log: Path, *flags: str) -> Iterator[httpx.Client]:
    """`tokenproxy serve` before an engine; yields a client of it, which knows its address as `base_url`."""
    options = ("--store", store, "--watch-interval-s", "0.2", *flags)
    with ServeProcess([engine.url], log, *options) as proxy:
        proxy.wait_ready()
        with httpx.Client(base_url=proxy.url, timeout=_PATIENCE_S, trust_env=False) as client:
            yield client


def store_state(client: httpx.Client) -> dict[str, Any]:
    """What `/ready` tells of the store."""
    state: dict[str, Any] = client.get("/ready").json()["store"]
    return state


@dataclass
class Wave:
    """The answers of all conversations to one request each, sent at once."""

    answers: list[Answered]

    @property
    def seconds(self) -> list[float]:
        """How long each request took, sorted."""
        return sorted(answer.response.elapsed.total_seconds() for answer in self.answers)

    @property
    def p99(self) -> float:
        """Seconds."""
        return self.seconds[int(len(self.answers) * 0.99) - 1]

    @property
    def median(self) -> float:
        """Seconds."""
        return self.seconds[len(self.answers) // 2]

    @property
    def reasons(self) -> set[str]:
        return {answer.reason for answer in self.answers}


class Crowd:
    """Clients that hold one conversation each. No other one starts with the same text."""

    def __init__(self, url: str, size: int) -> None:
        self.answers: list[Answered] = []
        self._url = url
        self._talks = [[user(f"Hi {secrets.token_hex(6)}")] for _ in range(size)]

    def ask(self) -> Wave:
        """One request of each conversation, all at once."""
        wave = Wave([Answered(response) for response in asyncio.run(self._ask())])
        for talk, answer in zip(self._talks, wave.answers, strict=True):
            assert answer.response.status_code == 200, answer.response.text
            talk += [answer.message, user("more")]
        self.answers += wave.answers
        return wave

    async def _ask(self) -> list[httpx.Response]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, connector=connector) as session:
            return await asyncio.gather(*(_send(session, talk) for talk in self._talks))


async def _send(session: aiohttp.ClientSession, messages: list[Message]) -> httpx.Response:
    """Send a request by aiohttp: with httpx, so many at once would wait for the client."""
    start = time.monotonic()
    async with session.post(CHAT, json={"messages": messages, "return_token_ids": True}) as response:
        answer = httpx.Response(response.status, headers=response.headers, content=await response.read())
    answer.elapsed = timedelta(seconds=time.monotonic() - start)
    return answer


def check_record(client: httpx.Client, answers: list[Answered]) -> None:
    """Every answer was recorded once, after the one before, as the engine consumed and sampled it."""
    by_session: dict[str, list[Answered]] = {}
    for answer in answers:
        by_session.setdefault(answer.session, []).append(answer)
    for session, expected in by_session.items():
        record = record_of(client, session, len(expected))
        assert [turn["id"] for turn in record.turns] == [answer.turn for answer in expected], session
        assert record.check_exact() == [(answer.prompt_ids, answer.ids) for answer in expected], session
