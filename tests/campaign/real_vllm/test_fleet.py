"""One proxy in front of two real engines: one is killed under load and comes back, the other is drained."""

import itertools
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server, running
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy, start_engine
from tests.campaign.real_vllm.plain import CHAT, Conversation, Turn, continues, user
from tests.support.quiet import quiet
from tests.support.utils import wait_until

_CLIENTS = 24


def _ask(url: str, number: int) -> str:
    """Send one request, every other one as a stream; the value is how it ended."""
    stream = number % 2 == 0
    body: dict[str, Any] = {"messages": [user(f"Count, request {number}.")], "max_tokens": 60}
    response = httpx.post(url + CHAT, json={**body, "ignore_eos": True, "stream": stream}, timeout=300)
    if response.status_code != 200:
        return f"{response.status_code} {response.text[:200]}"
    if stream and not response.text.endswith("data: [DONE]\n\n"):
        return "stream broke off" if '"error"' in response.text else "ended without a word"
    return "whole"


def _served(url: str) -> float:
    """Requests that an engine completed, by its own metric; it counts aborted ones too, and those late."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return sum(float(line.split()[-1]) for line in counts if 'finished_reason="abort"' not in line)


@pytest.mark.timeout(START_TIMEOUT_S + 600)
def test_kill_return_and_drain(servers: Mapping[str, Server], model: Path, tmp_path: Path) -> None:
    stock = servers["in front"].engine
    flags = ("--store", "memory:", "--watch-interval-s", "1")
    with ExitStack() as stack:
        second = stack.enter_context(start_engine(model, tmp_path / "vllm.log", plugin=False))
        second.wait_ready(START_TIMEOUT_S, progress=quiet)
        url = stack.enter_context(run_proxy(stock.url, "--upstream", second.url, *flags))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=300))

        def ready() -> set[str]:
            replicas = http.get("/admin/replicas").json()["replicas"]
            return {each["engine"] for each in replicas if each["ready"]}

        def ask(text: str) -> Turn:
            return conversation.ask(user(text), max_tokens=8)

        wait_until(lambda: len(ready()) == 2, 60)
        conversation = Conversation(http, [])

        # a conversation stays on its replica
        before = {engine.url: _served(engine.url) for engine in (stock, second)}
        turns = [ask(text) for text in ("Hi.", "And?", "More.")]
        none, all_three = sorted(_served(engine) - count for engine, count in before.items())
        # an engine that is slow to respond is also asked for one token
        assert none == 0 and all_three >= 3

        # SIGKILL under load: requests that had not begun to stream are served by the other one;
        # there are so many because the conversation counts as several of them where it is
        with ThreadPoolExecutor(_CLIENTS) as threads:
            outcomes = [threads.submit(_ask, url, number) for number in range(_CLIENTS)]
            # one that ran there alone would count as the cause
            wait_until(lambda: running(second) >= 3, 60)
            assert second.pid is not None
            os.killpg(second.pid, signal.SIGKILL)
            wait_until(lambda: ready() == {stock.url})
        assert {outcome.result() for outcome in outcomes} <= {"whole", "stream broke off"}
        turns.append(ask("Go on."))

        # it comes back on its port, and serves alone while the other one is drained
        second.stop(progress=quiet)
        second.start()
        second.wait_ready(START_TIMEOUT_S, progress=quiet)
        wait_until(lambda: len(ready()) == 2)
        http.post("/admin/replicas/drain", json={"url": stock.url})
        count = _served(second.url)
        turns.append(ask("On and on."))
        assert all(continues(turn, earlier) for earlier, turn in itertools.pairwise(turns))
        assert _served(second.url) > count
