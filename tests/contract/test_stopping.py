"""The end of a proxy process, and its start before its engines."""

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from proxy.history.store import Limits, session_id
from proxy.history.turn import Turn, unpack_ids
from proxy.history.vocabulary import ABORTED
from proxy.stores.urls import make_store
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.serve_process import ServeProcess, is_process, metrics_folder
from tests.support.tiny_model import END, HI, TinyModel
from tests.support.utils import send_and_keep, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.waits]  # each test starts a process

_TOKENS, _CHAT, _MESSAGES = "/v1/chat/completions/tokens", "/v1/chat/completions", "/v1/messages"
_HI = [{"role": "user", "content": "Hi"}]
workers = pytest.mark.parametrize("count", [1, 2])
_LONG = Reply(ids=(*HI * 3000, END), pause_s=0.1)
"""A stream of ten minutes."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/rollouts.db"


def _proxy(fake: FakeVllm, folder: Path, store: str, *flags: str) -> ServeProcess:
    return ServeProcess([fake.url], folder / "proxy.log", "--store", store, *flags)


@dataclass
class _Stream:
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


async def _stream(url: str, session: str, begun: asyncio.Semaphore) -> _Stream:
    got, started = _Stream(), False
    body = {"messages": _HI, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"x-session-id": session}) as http,
        http.post(url + _TOKENS, json=body) as response,
    ):
        async for line in response.content:
            got.read(line)
            if got.ids and not started:
                started = True
                begun.release()
    return got


async def _recorded(store: str, sessions: list[str]) -> list[list[Turn]]:
    opened = make_store(store, Limits())
    await opened.open()
    try:
        return [await opened.turns(session_id("", name)) for name in sessions]
    finally:
        await opened.aclose()


@workers
async def test_streams_end_or_are_cut_and_all_is_recorded(
    mortal: FakeVllm, tmp_path: Path, store: str, count: int
) -> None:
    """50 streams run at SIGTERM: half of them end within `drain_s`."""
    short = Reply(ids=(*HI * 10, END), pause_s=0.2)
    mortal.replies.extend([short, _LONG] * 25)
    with _proxy(mortal, tmp_path, store, "--drain-s", "10", "--workers", str(count)) as proxy:
        proxy.wait_workers_ready(count)
        processes = proxy.workers
        names, begun = [f"s{number}" for number in range(50)], asyncio.Semaphore(0)
        tasks = [asyncio.create_task(_stream(proxy.url, name, begun)) for name in names]
        async with asyncio.timeout(60):
            for _ in names:
                await begun.acquire()
        proxy.signal()
        streams = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(proxy.wait) == 0
    assert not any(map(is_process, processes))

    assert sum(stream.done for stream in streams) == 25
    for stream, [turn] in zip(streams, await _recorded(store, names), strict=True):
        recorded = unpack_ids(turn.completion)
        if stream.done:
            assert (stream.ids, stream.error) == (list(short.ids), None)
            assert (recorded, turn.finish_reason) == (stream.ids, "stop")
        else:
            assert stream.error is not None
            assert (stream.error["code"], stream.error["type"]) == ("stopping", "ServiceUnavailableError")
            assert len(stream.ids) > len(short.ids)
            assert recorded[: len(stream.ids)] == stream.ids
            assert turn.finish_reason == ABORTED
    wait_until(lambda: not mortal.running)
    assert mortal.aborted == 25
    assert sum(map(int, re.findall(r"(\d+) requests are cut", proxy.text))) == 25
    assert "Traceback" not in proxy.text


@workers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_cuts_at_once(
    mortal: FakeVllm, tmp_path: Path, store: str, number: signal.Signals, count: int
) -> None:
    mortal.replies.append(_LONG)
    with _proxy(mortal, tmp_path, store, "--drain-s", "600", "--workers", str(count)) as proxy:
        proxy.wait_ready()
        begun = asyncio.Semaphore(0)
        task = asyncio.create_task(_stream(proxy.url, "s", begun))
        async with asyncio.timeout(60):
            await begun.acquire()
        proxy.signal(number)
        await asyncio.sleep(0.5)
        assert not task.done()
        proxy.signal(number)
        stream = await task
        assert await asyncio.to_thread(proxy.wait) == 0
    [[turn]] = await _recorded(store, ["s"])
    assert stream.error is not None
    assert unpack_ids(turn.completion)[: len(stream.ids)] == stream.ids != []


@workers
def test_requests_are_served_before_the_socket_closes(
    mortal: FakeVllm, tmp_path: Path, store: str, count: int
) -> None:
    with _proxy(mortal, tmp_path, store, "--stop-delay-s", "2", "--workers", str(count)) as proxy:
        proxy.wait_workers_ready(count)
        proxy.signal()
        with httpx.Client(base_url=proxy.url, trust_env=False, timeout=20) as client:
            wait_until(lambda: client.get("/ready").status_code == 503)
            state = client.get("/ready").json()
            assert (state["ready"], state["stopping"]) == (False, True)
            assert client.get("/health").status_code == 200
            assert client.post(_CHAT, json={"messages": _HI}).status_code == 200
        assert proxy.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{proxy.url}/health", trust_env=False)


@pytest.mark.parametrize("stage", ["waits for the engine", "sends its body"])
def test_a_response_that_has_not_begun_is_an_error_object(
    mortal: FakeVllm, tmp_path: Path, store: str, stage: str
) -> None:
    mortal.replies.append(Reply(hold_at=0))
    body = json.dumps({"messages": _HI}).encode()
    with _proxy(mortal, tmp_path, store, "--drain-s", "0.2") as proxy:
        proxy.wait_ready()
        sent = body if stage == "waits for the engine" else body[:-1]
        with send_and_keep(httpx.URL(proxy.url), _CHAT, sent, announced=len(body)) as connection:
            if stage == "waits for the engine":
                wait_until(lambda: mortal.running)
            else:
                time.sleep(0.5)  # nothing shows that a part of a body arrived
            proxy.signal()
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert proxy.wait() == 0
    head_lines, _, error = answer.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 2" in head_lines
    assert json.loads(error)["error"]["code"] == "stopping"
    wait_until(lambda: not mortal.running)


async def test_a_cut_stream_ends_in_its_own_wire_format(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    """Anthropic's errors are named events."""
    body = {"model": "tiny", "max_tokens": 8, "messages": _HI, "stream": True}
    async with aiohttp.ClientSession() as http:
        with _proxy(mortal, tmp_path, store, "--drain-s", "0.2") as proxy:
            proxy.wait_ready()
            mortal.release()
            mortal.endless[_CHAT] = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
            async with http.post(proxy.url + _MESSAGES, json=body) as response:
                await response.content.readuntil(b"\n\n")
                proxy.signal()
                rest = await response.content.read()
            assert await asyncio.to_thread(proxy.wait) == 0
    *_, last = rest.strip().split(b"\n\n")
    assert last.startswith(b'event: error\ndata: {"type":"error"')
    assert b"overloaded_error" in last


def test_clients_that_do_not_read_do_not_hold_the_end(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n'
    body = json.dumps({"messages": _HI, "stream": True}).encode()
    with _proxy(mortal, tmp_path, store, "--drain-s", "0.2") as proxy:
        proxy.wait_ready()
        mortal.release()
        mortal.endless[_CHAT] = event % (b"x" * 65536)
        with send_and_keep(httpx.URL(proxy.url), _CHAT, body):
            wait_until(lambda: mortal.running)
            time.sleep(1)
            proxy.signal()
            assert proxy.wait(30) == 0
    assert "Traceback" not in proxy.text


def test_a_start_before_the_engines(tiny_model: TinyModel, tmp_path: Path, store: str) -> None:
    """No engine of two responds; then one comes up."""
    with FakeVllm(tiny_model) as probe:
        port = probe.port  # a free one, which the engine takes later
    urls = [f"http://127.0.0.1:{port}", "http://127.0.0.1:9"]
    with (
        ServeProcess(urls, tmp_path / "proxy.log", "--store", store) as proxy,
        httpx.Client(base_url=proxy.url, trust_env=False, timeout=40) as client,
    ):
        early = client.post(_CHAT, json={"messages": _HI})
        assert (early.status_code, early.headers["retry-after"]) == (503, "2")
        assert early.json()["error"]["type"] == "ServiceUnavailableError"
        state = client.get("/ready")
        assert state.status_code == 503
        assert [engine["engine"] for engine in state.json()["engines"] if engine["problem"]] == urls
        assert all(f"{url} is not ready: " in proxy.text for url in urls)
        with FakeVllm(tiny_model, port=port):
            proxy.wait_ready()
            assert [engine["ready"] for engine in client.get("/ready").json()["engines"]] == [True, False]
            assert client.post(_CHAT, json={"messages": _HI}).status_code == 200


def test_requests_wait_for_the_first_answer_of_an_engine(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    """It listens, but takes its time."""
    mortal.slow_s["/health"] = 1.5
    with _proxy(mortal, tmp_path, store) as proxy:
        answer = httpx.post(proxy.url + _CHAT, json={"messages": _HI}, trust_env=False, timeout=40)
    assert answer.status_code == 200


async def test_workers_drain_when_their_parent_is_killed(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    short = Reply(ids=(*HI * 10, END), pause_s=0.2)
    mortal.replies.append(short)
    with _proxy(mortal, tmp_path, store, "--workers", "2", "--stop-delay-s", "600") as proxy:
        proxy.wait_workers_ready(2)
        begun, processes = asyncio.Semaphore(0), proxy.workers
        folder = metrics_folder(processes[0])
        task = asyncio.create_task(_stream(proxy.url, "s", begun))
        async with asyncio.timeout(60):
            await begun.acquire()
        proxy.signal(signal.SIGKILL)
        stream = await task
        assert (stream.done, stream.ids, stream.error) == (True, list(short.ids), None)
        await asyncio.to_thread(wait_until, lambda: not any(map(is_process, processes)))
    assert not folder.exists()
    assert proxy.text.count("the parent process has ended") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_parent_and_workers_at_once_drains(
    mortal: FakeVllm, tmp_path: Path, store: str, number: signal.Signals
) -> None:
    """As Ctrl-C in a terminal, or systemd: it counts once."""
    mortal.replies.append(Reply(hold_at=0))
    body = json.dumps({"messages": _HI}).encode()
    with _proxy(mortal, tmp_path, store, "--workers", "2") as proxy:
        proxy.wait_workers_ready(2)
        with send_and_keep(httpx.URL(proxy.url), _CHAT, body) as connection:
            wait_until(lambda: mortal.running)
            for process in [*proxy.workers, proxy.pid]:
                os.kill(process, number)
            wait_until(lambda: proxy.text.count("up to 30 s for 1 requests to end") == 1)
            time.sleep(0.5)  # nothing shows that a signal changed nothing
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{proxy.url}/health", trust_env=False)
            mortal.release()
            answer = connection.recv(65536)
        assert proxy.wait() == 0
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert "are cut" not in proxy.text
