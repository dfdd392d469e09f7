"""The end of a vLLM with the plugin, and of its engine, under a stream."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.acceptance.formats import TOKENS, stream_of
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, start_engine, wait_ready
from tests.contract.test_stopping import recorded
from tokenproxy.app.children import group_members
from tokenproxy.record.turn import unpack_ids

_LONG: dict[str, Any] = {"prompt_ids": [1, 4093, 198, 2683, 2, 198], "max_tokens": 3000, "ignore_eos": True}
_SESSION = "inside"


def _read(url: str, begun: Event) -> list[dict[str, Any]]:
    """Read a stream to its end; `begun` is set after a few events."""
    events = []
    body, headers = {**_LONG, "stream": True}, {"x-session-id": _SESSION}
    with httpx.stream("POST", url + TOKENS, json=body, headers=headers, timeout=120) as response:
        for event in stream_of(response):
            events.append(event)
            if len(events) >= 5:
                begun.set()
    return events


@pytest.mark.timeout(START_TIMEOUT_S + 300)
@pytest.mark.parametrize(("number", "api_servers"), [(signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_a_stream_that_is_cut_ends_with_an_error_and_is_recorded(
    model: Path, tmp_path: Path, number: signal.Signals, api_servers: int
) -> None:
    """By SIGTERM to vLLM, or because its engine core is killed."""
    store = f"sqlite://{tmp_path}/inside.db"
    log, variables = tmp_path / "vllm.log", {"TOKENPROXY_STORE": store}
    with (
        start_engine(model, log, api_server_count=api_servers, environment=variables) as engine,
        ThreadPoolExecutor(1) as threads,
    ):
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        begun = Event()
        reading = threads.submit(_read, engine.url, begun)
        assert begun.wait(60)
        assert engine.pid is not None
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in group_members(engine.pid)}
        [core] = [pid for pid, name in names.items() if "EngineCor" in name]
        os.kill(engine.pid if number == signal.SIGTERM else core, number)
        events = reading.result(60)
    assert events[-1]["error"]["message"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    got = [token for choice in choices for token in choice.get("token_ids") or ()]
    [[turn]] = asyncio.run(recorded(store, [_SESSION]))
    assert unpack_ids(turn.completion)[: len(got)] == got != []
