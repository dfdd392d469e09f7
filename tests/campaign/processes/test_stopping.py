"""The end of several worker processes, and of a proxy with clients that do not read."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.contract.test_stopping import check_streams_end_or_are_cut, stream
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.serve_process import ServeProcess, is_process, metrics_folder
from tests.support.tiny_model import END, HI
from tests.support.utils import send_and_keep, wait_until

_CHAT = "/v1/chat/completions"
_HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/rollouts.db"


async def test_streams_of_workers_end_or_are_cut(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    flags = ("--store", store, "--drain-s", "600", "--workers", "2")
    with ServeProcess([mortal.url], tmp_path / "proxy.log", *flags) as proxy:
        proxy.wait_workers_ready(2)
        processes = proxy.workers
        await check_streams_end_or_are_cut(mortal, proxy, store, signal.SIGINT)
    assert not any(map(is_process, processes))


def test_clients_that_do_not_read_do_not_hold_the_end(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "%s"}}]}\n\n'
    body = json.dumps({"messages": _HI, "stream": True}).encode()
    flags = ("--store", store, "--drain-s", "0.2")
    with ServeProcess([mortal.url], tmp_path / "proxy.log", *flags) as proxy:
        proxy.wait_ready()
        mortal.release()
        mortal.endless[_CHAT] = event % (b"x" * 65536)
        with send_and_keep(httpx.URL(proxy.url), _CHAT, body):
            wait_until(lambda: mortal.running)
            time.sleep(1)
            proxy.signal()
            assert proxy.wait(30) == 0
    assert "Traceback" not in proxy.text


async def test_workers_drain_when_their_parent_is_killed(
    mortal: FakeVllm, tmp_path: Path, store: str
) -> None:
    short = Reply(ids=(*HI * 10, END), pause_s=0.2)
    mortal.replies.append(short)
    flags = ("--store", store, "--workers", "2", "--stop-delay-s", "600")
    with ServeProcess([mortal.url], tmp_path / "proxy.log", *flags) as proxy:
        proxy.wait_workers_ready(2)
        begun, processes = asyncio.Semaphore(0), proxy.workers
        folder = metrics_folder(processes[0])
        task = asyncio.create_task(stream(proxy.url, "s", begun))
        await begun.acquire()
        proxy.signal(signal.SIGKILL)
        got = await task
        assert (got.done, got.ids, got.error) == (True, list(short.ids), None)
        await asyncio.to_thread(wait_until, lambda: not any(map(is_process, processes)))
    assert not folder.exists()
    assert proxy.text.count("the parent process has ended") == 2


def test_a_signal_to_parent_and_workers_at_once_drains(mortal: FakeVllm, tmp_path: Path, store: str) -> None:
    """As Ctrl-C in a terminal, or systemd: it counts once."""
    mortal.replies.append(Reply(hold_at=0))
    body = json.dumps({"messages": _HI}).encode()
    flags = ("--store", store, "--workers", "2")
    with ServeProcess([mortal.url], tmp_path / "proxy.log", *flags) as proxy:
        proxy.wait_workers_ready(2)
        with send_and_keep(httpx.URL(proxy.url), _CHAT, body) as connection:
            wait_until(lambda: mortal.running)
            for process in [*proxy.workers, proxy.pid]:
                os.kill(process, signal.SIGTERM)
            wait_until(lambda: proxy.text.count("up to 30 s for 1 requests to end") == 1)
            time.sleep(0.5)  # nothing shows that a signal changed nothing
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{proxy.url}/health", trust_env=False)
            mortal.release()
            answer = connection.recv(65536)
        assert proxy.wait() == 0
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert "are cut" not in proxy.text
