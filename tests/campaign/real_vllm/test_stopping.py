"""The end of a vLLM with the plugin, and of its engine, under a stream."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.children import group_members
from proxy.demo.stack import EngineProcess
from proxy.history.store import Limits, session_id
from proxy.history.turn import unpack_ids
from proxy.stores.urls import make_store
from tests.acceptance.formats import TOKENS, stream_of
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, start_engine, wait_ready

PROMPT = [1, 4093, 198, 2683, 2, 198, 1, 520, 9531, 198]
_LONG: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
_STORE_VARIABLE = "TOKENPROXY_STORE"


@pytest.fixture
def engine(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[EngineProcess]:
    """A vLLM with the plugin, whose turns are in `inside.db`. The parameter: number of API servers."""
    variables = {_STORE_VARIABLE: f"sqlite://{tmp_path}/inside.db"}
    with start_engine(
        model, tmp_path / "vllm.log", api_server_count=request.param, environment=variables
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        yield engine


class _Stream(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.ids: list[int] = []
        self.last: dict[str, Any] = {}
        self.begun = threading.Event()

    def run(self) -> None:
        with httpx.stream(
            "POST", self.url + TOKENS, json=_LONG, headers={"x-session-id": "inside"}, timeout=120
        ) as response:
            for event in stream_of(response):
                self.last = event
                for choice in event.get("choices", ()):
                    self.ids += choice.get("token_ids") or ()
                if len(self.ids) >= 5:
                    self.begun.set()


async def _recorded(url: str) -> list[int]:
    """The sampled ids of the only turn of the session `inside`, out of the store."""
    store = make_store(url, Limits())
    await store.open()
    try:
        [turn] = await store.turns(session_id("", "inside"))
    finally:
        await store.aclose()
    return unpack_ids(turn.completion)


@pytest.mark.parametrize("engine", [1], indirect=True)
@pytest.mark.timeout(START_TIMEOUT_S + 300)
def test_a_stream_that_is_cut_is_recorded(engine: EngineProcess, tmp_path: Path) -> None:
    stream = _Stream(engine.url)
    stream.start()
    assert stream.begun.wait(60)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGTERM)
    stream.join(60)
    assert not stream.is_alive()
    recorded = asyncio.run(_recorded(f"sqlite://{tmp_path}/inside.db"))
    assert recorded[: len(stream.ids)] == stream.ids


@pytest.mark.parametrize("engine", [2], indirect=True)
@pytest.mark.timeout(START_TIMEOUT_S + 300)
def test_a_stream_whose_engine_core_is_killed_ends_with_an_error(engine: EngineProcess) -> None:
    stream = _Stream(engine.url)
    stream.start()
    assert stream.begun.wait(60)
    assert engine.pid is not None
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in group_members(engine.pid)}
    [core] = [pid for pid, name in names.items() if "EngineCor" in name]
    os.kill(core, signal.SIGKILL)
    stream.join(60)
    assert not stream.is_alive()
    assert stream.last["error"]["message"]
