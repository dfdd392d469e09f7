"""Many conversations at once with a proxy in a process of its own, and what it must have recorded of them."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT, user

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


def counted(client: httpx.Client, counter: str) -> float:
    """The sum of a counter over its labels."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counter))


@dataclass
class Answer:
    """What a client got for one request."""

    seconds: float
    session: str
    turn: str
    reason: str
    source: str
    prompt: list[int]
    completion: list[int]


@dataclass
class Wave:
    """The answers of all conversations to one request each, sent at once."""

    answers: list[Answer]

    @property
    def p99(self) -> float:
        """Seconds."""
        return sorted(answer.seconds for answer in self.answers)[int(len(self.answers) * 0.99) - 1]

    @property
    def median(self) -> float:
        """Seconds."""
        return sorted(answer.seconds for answer in self.answers)[len(self.answers) // 2]

    @property
    def reasons(self) -> set[str]:
        return {answer.reason for answer in self.answers}


@dataclass
class Crowd:
    """Clients that hold one conversation each. No other one starts with the same text."""

    url: str
    size: int
    headers: dict[str, str] = field(default_factory=dict)
    talks: list[list[dict[str, Any]]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.talks = [[user(f"Hi {secrets.token_hex(6)}")] for _ in range(self.size)]

    def ask(self) -> Wave:
        """One request of each conversation, all at once."""
        wave = asyncio.run(self._ask())
        self.answers += wave.answers
        return wave

    async def _ask(self) -> Wave:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, connector=connector) as session:
            return Wave(await asyncio.gather(*(self._one(session, talk) for talk in self.talks)))

    async def _one(self, session: aiohttp.ClientSession, talk: list[dict[str, Any]]) -> Answer:
        body = {"messages": talk, "return_token_ids": True}
        start = time.monotonic()
        async with session.post(CHAT, json=body, headers=self.headers) as response:
            answered = await response.json()
            seconds = time.monotonic() - start
            assert response.status == 200, answered
            headers = response.headers
        (choice,) = answered["choices"]
        talk += [{"role": "assistant", "content": choice["message"]["content"]}, user("more")]
        return Answer(
            seconds,
            headers["x-session-id"],
            headers["x-turn-id"],
            headers.get("x-prompt-reason", ""),
            headers["x-prompt-source"],
            answered["prompt_token_ids"],
            choice["token_ids"],
        )


def check_record(client: httpx.Client, answers: list[Answer]) -> None:
    """Every answer was recorded once, with its parent, as the engine consumed and sampled it."""
    by_session: dict[str, dict[str, Answer]] = {}
    for answer in answers:
        by_session.setdefault(answer.session, {})[answer.turn] = answer
    for session, expected in by_session.items():
        recorded = client.get(f"/v1/sessions/{session}?ids=true").json()["turns"]
        turns = {turn["id"]: turn for turn in recorded}
        assert sorted(turn["id"] for turn in recorded) == sorted(expected), session
        for name, turn in turns.items():
            parent = turns[turn["parent"]] if turn["parent"] else None
            before = parent["all_ids"] if parent else []
            prompt = [*before, *turn["appended_ids"]]
            turn["all_ids"] = [*prompt, *turn["completion_ids"]]
            assert prompt == expected[name].prompt, (session, name)
            assert turn["completion_ids"] == expected[name].completion
        exported = client.get(f"/v1/sessions/{session}/samples").json()
        assert exported["refused"] == []
        trained = {turn["id"] for sample in exported["samples"] for turn in sample["turns"]}
        assert trained == set(expected)
