"""The start and the end of a proxy process: at SIGTERM requests end or are cut, and all is recorded."""

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.ports import held_port
from tests.support.serve_process import ServeProcess, is_process
from tests.support.store_utils import opened
from tests.support.tiny_model import END, HI
from tests.support.utils import send_and_keep, until, wait_until
from tokenproxy.app.server import Server, run, server_config
from tokenproxy.record.store import session_id
from tokenproxy.record.turn import Turn, unpack_ids
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.settings import Settings
from tokenproxy.turn.services import RunningRequests

pytestmark = pytest.mark.timeout(60)
"""A process imports the whole program before a request is answered."""

TOKENS, _CHAT, _MESSAGES = "/v1/chat/completions/tokens", "/v1/chat/completions", "/v1/messages"
_HI = [{"role": "user", "content": "Hi"}]
_HELD = Reply(ids=(*HI * 10, END), hold_at=3)
"""A stream that pauses after it began."""
ENDLESS = Reply(ids=(*HI * 3000, END), pause_s=0.1)
"""A stream of ten minutes."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/rollouts.db"


@dataclass
class Stream:
    """What a client got of a stream."""

    ids: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False

    def read(self, line: bytes) -> None:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            self.done = True
        elif data:
            chunk = json.loads(data)
            self.error = chunk.get("error", self.error)
            choices = chunk.get("choices", [])
            self.ids += [token for choice in choices for token in choice.get("token_ids") or ()]


async def stream(url: str, session: str, begun: asyncio.Semaphore) -> Stream:
    """Read a stream to its end; `begun` is released at its first id."""
    got, started = Stream(), False
    body = {"messages": _HI, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"x-session-id": session}) as http,
        http.post(url + TOKENS, json=body) as response,
    ):
        async for line in response.content:
            got.read(line)
            if got.ids and not started:
                started = True
                begun.release()
    return got


async def recorded(store: str, sessions: list[str]) -> list[list[Turn]]:
    """The turns of some sessions, read after the proxy ended."""
    async with opened(store) as read:
        return [await read.turns(session_id("", name)) for name in sessions]


async def check_streams_end_or_are_cut(
    engine: FakeVllm, proxy: ServeProcess, store: str, number: signal.Signals
) -> None:
    """After the first signal half of the streams end in their own time; a second cuts the others at once."""
    engine.replies.extend([_HELD, ENDLESS] * 4)
    names, begun = [f"s{number}" for number in range(8)], asyncio.Semaphore(0)
    tasks = [asyncio.create_task(stream(proxy.url, name, begun)) for name in names]
    for _ in names:
        await begun.acquire()
    proxy.signal(number)
    await asyncio.to_thread(wait_until, lambda: "requests to end" in proxy.text)
    engine.release()
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 4:
        more, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    assert all(task.result().done for task in done)
    proxy.signal(number)
    streams = await asyncio.gather(*tasks)
    assert await asyncio.to_thread(proxy.wait) == 0
    for got, [turn] in zip(streams, await recorded(store, names), strict=True):
        ids = unpack_ids(turn.completion)
        if got.done:
            assert (got.ids, got.error) == (list(_HELD.ids), None)
            assert (ids, turn.finish_reason) == (got.ids, "stop")
        else:
            assert got.error is not None
            assert (got.error["code"], got.error["type"]) == ("stopping", "ServiceUnavailableError")
            assert ids[: len(got.ids)] == got.ids != []
            assert turn.finish_reason == ABORTED
    await asyncio.to_thread(wait_until, lambda: not engine.running)
    assert engine.aborted == 4
    assert "Traceback" not in proxy.text


async def test_streams_end_or_are_cut_and_all_is_recorded(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    with ServeProcess([mortal.url], tmp_path / "proxy.log", "--store", store, "--drain-s", "600") as proxy:
        proxy.wait_ready()
        await check_streams_end_or_are_cut(mortal, proxy, store, signal.SIGTERM)
    assert not is_process(proxy.pid)


async def test_a_cut_request_gets_an_error_in_its_own_format(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    """One waits for the engine, one still sends its body, one is a stream of Anthropic's named events."""
    body = json.dumps({"messages": _HI}).encode()
    message = {"model": "tiny", "max_tokens": 8, "messages": _HI, "stream": True}
    mortal.replies.extend([_HELD, Reply(hold_at=0)])
    with ServeProcess([mortal.url], tmp_path / "proxy.log", "--store", store, "--drain-s", "0.2") as proxy:
        proxy.wait_ready()
        url = httpx.URL(proxy.url)
        async with aiohttp.ClientSession() as http, http.post(proxy.url + _MESSAGES, json=message) as events:
            await events.content.readuntil(b"\n\n")
            with (
                send_and_keep(url, _CHAT, body) as waiting,
                send_and_keep(url, _CHAT, body[:-1], announced=len(body)) as sending,
            ):
                await asyncio.to_thread(wait_until, lambda: mortal.running == 2)
                await asyncio.to_thread(wait_until, lambda: _in_flight(proxy) == 3)
                proxy.signal()
                answers = [
                    await asyncio.to_thread(lambda: b"".join(iter(lambda: sent.recv(65536), b"")))  # noqa: B023
                    for sent in (waiting, sending)
                ]
                rest = await events.content.read()
        assert await asyncio.to_thread(proxy.wait) == 0
    for answer in answers:
        head, _, error = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 2" in head
        assert json.loads(error)["error"]["code"] == "stopping"
    *_, last = rest.strip().split(b"\n\n")
    assert last.startswith(b'event: error\ndata: {"type":"error"') and b"overloaded_error" in last


def _in_flight(proxy: ServeProcess) -> float:
    lines = httpx.get(f"{proxy.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tokenproxy_requests_in_flight "))


def test_requests_are_served_before_the_socket_closes(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    """With `stop_delay_s` a load balancer has time to notice; a second signal ends it."""
    flags = ("--store", store, "--stop-delay-s", "600")
    with ServeProcess([mortal.url], tmp_path / "proxy.log", *flags) as proxy:
        proxy.wait_ready()
        proxy.signal()
        with httpx.Client(base_url=proxy.url, trust_env=False, timeout=20) as client:
            wait_until(lambda: client.get("/ready").status_code == 503)
            state = client.get("/ready").json()
            assert (state["ready"], state["stopping"]) == (False, True)
            assert client.get("/health").status_code == 200
            assert client.post(_CHAT, json={"messages": _HI}).status_code == 200
        proxy.signal()
        assert proxy.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{proxy.url}/health", trust_env=False)


def test_a_required_store_that_does_not_respond(caplog: pytest.LogCaptureFixture) -> None:
    with held_port() as port:
        store = f"redis://127.0.0.1:{port}/0"
        settings = Settings(upstreams=["http://127.0.0.1:1"], port=0, store=store, store_required=True)
        assert run(settings) == 1
    assert store in caplog.text and "is the server running" in caplog.text


async def test_a_thread_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("tokenproxy.app.server.END_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended.append)
    settings = Settings(upstreams=["http://127.0.0.1:1"], store="memory:")
    server = Server(server_config(settings, RunningRequests()), RunningRequests(), 0.0, 0.0)
    server._on_signal(signal.SIGTERM)
    await until(lambda: ended)
    assert ended == [1] and server.should_exit
