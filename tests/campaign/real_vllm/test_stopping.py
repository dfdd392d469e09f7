"""The end of a proxy, and of a vLLM with the plugin, under a stream of a real engine."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from proxy.history.store import Limits, session_id
from proxy.history.turn import unpack_ids
from proxy.stores.urls import make_store
from tests.acceptance.formats import TOKENS, stream_of
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, start_engine, wait_ready
from tests.support.ports import held_port

PROMPT = [1, 4093, 198, 2683, 2, 198, 1, 520, 9531, 198]
_LONG: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
_STORE_VARIABLE = "TOKENPROXY_STORE"


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    """A vLLM with the plugin and one API server, whose turns are in `inside.db`."""
    variables = {_STORE_VARIABLE: f"sqlite://{tmp_path}/inside.db"}
    with start_engine(model, tmp_path / "vllm.log", environment=variables) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        yield engine


class _Stream(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url: str, session: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.session = session
        self.ids: list[int] = []
        self.last: dict[str, Any] = {}
        self.begun = threading.Event()

    def run(self) -> None:
        with httpx.stream(
            "POST", self.url + TOKENS, json=_LONG, headers={"x-session-id": self.session}, timeout=120
        ) as response:
            for event in stream_of(response):
                self.last = event
                for choice in event.get("choices", ()):
                    self.ids += choice.get("token_ids") or ()
                if len(self.ids) >= 5:
                    self.begun.set()


def _serve(upstream: str, port: int, store: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", upstream, "--port", str(port)]
    return subprocess.Popen([*command, "--store", store, "--drain-s", "1"])


def _turns(url: str) -> list[dict[str, Any]]:
    """What is recorded of the session `s`."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/sessions/s?ids=true", timeout=30).json()["turns"]
    return found


async def _recorded(url: str) -> list[int]:
    """The sampled ids of the only turn of the session `inside`, out of the store."""
    store = make_store(url, Limits())
    await store.open()
    try:
        [turn] = await store.turns(session_id("", "inside"))
    finally:
        await store.aclose()
    return unpack_ids(turn.completion)


@pytest.mark.timeout(START_TIMEOUT_S + 300)
def test_a_stream_that_is_cut_is_recorded_and_continued(engine: EngineProcess, tmp_path: Path) -> None:
    """First a proxy in front is stopped and started again, then the engine itself, with the plugin."""
    store = f"sqlite://{tmp_path}/front.db"
    with held_port() as port:
        _check_proxy(engine.url, port, store)
    stream = _Stream(engine.url, "inside")  # the proxy in front has sent `s`
    stream.start()
    assert stream.begun.wait(60)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGTERM)
    stream.join(60)
    assert not stream.is_alive()
    recorded = asyncio.run(_recorded(f"sqlite://{tmp_path}/inside.db"))
    assert recorded[: len(stream.ids)] == stream.ids


def _check_proxy(upstream: str, port: int, store: str) -> None:
    url = f"http://127.0.0.1:{port}"
    first = _serve(upstream, port, store)
    try:
        wait_ready(url)
        stream = _Stream(url, "s")
        stream.start()
        assert stream.begun.wait(60)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
        stream.join(30)
    finally:
        first.kill()
    assert stream.last["error"]["code"] == "stopping"

    second = _serve(upstream, port, store)
    try:
        wait_ready(url)
        [turn] = _turns(url)
        assert turn["completion_ids"][: len(stream.ids)] == stream.ids
        sofar = PROMPT + turn["completion_ids"]
        body = {"prompt_ids": sofar, "max_tokens": 1}
        again = httpx.post(url + TOKENS, json=body, headers={"x-session-id": "s"}, timeout=60).json()
        assert again["prompt_token_ids"] == sofar
        assert len(_turns(url)) == 2
    finally:
        second.terminate()
        assert second.wait(60) == 0
