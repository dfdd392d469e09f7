"""One proxy in front of two real engines: one is killed under load and comes back, the other is drained."""

import itertools
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server, running
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, ready, replicas, run_proxy, start_engine
from tests.support.quiet import quiet
from tests.support.talk import CHAT, Answered, Conversation, user
from tests.support.utils import wait_until

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)

_CLIENTS = 24
_ADMIN = "/admin/replicas"


class _Client(threading.Thread):
    """Sends one request; every other one is a stream."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self.stream = number % 2 == 0
        self.outcome = ""
        self._url = url
        self._body: dict[str, Any] = {
            "messages": [user(f"Count, request {number}.")],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": self.stream,
        }

    def run(self) -> None:
        received = b""
        with httpx.stream("POST", self._url + CHAT, json=self._body, timeout=300) as response:
            for chunk in response.iter_raw():
                received += chunk
        if response.status_code != 200:
            self.outcome = f"{response.status_code} {received[:200]!r}"
        elif self.stream and not received.endswith(b"data: [DONE]\n\n"):
            self.outcome = "broke off" if b'"error"' in received else "ended without a word"
        else:
            self.outcome = "whole"


def _served(url: str) -> float:
    """Requests that an engine completed, by its own metric; it counts aborted ones too, and those late."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
    return sum(float(line.split()[-1]) for line in counts if 'finished_reason="abort"' not in line)


def _ask(conversation: Conversation, text: str) -> Answered:
    return conversation.ask(user(text), max_tokens=8)


def test_kill_return_and_drain(servers: Mapping[str, Server], model: Path, tmp_path: Path) -> None:
    stock = servers["in front"].engine
    flags = ("--store", f"sqlite:///{tmp_path}/fleet.db", "--watch-interval-s", "1")
    with ExitStack() as stack:
        second = stack.enter_context(start_engine(model, tmp_path / "vllm.log", plugin=False))
        second.wait_ready(START_TIMEOUT_S, progress=quiet)
        url = stack.enter_context(run_proxy(stock.url, "--upstream", second.url, *flags))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        wait_until(lambda: ready(http) == 2, 60)
        conversation = Conversation(http, [])

        # a conversation stays on its replica
        before = {engine.url: _served(engine.url) for engine in (stock, second)}
        turns = [_ask(conversation, text) for text in ("Hi.", "And?", "More.")]
        assert all(turn.continues(earlier) for earlier, turn in itertools.pairwise(turns))
        none, all_three = sorted(_served(engine) - count for engine, count in before.items())
        # an engine that is slow to respond is also asked for one token
        assert none == 0 and all_three >= 3

        # SIGKILL under load: requests that had not begun to stream are served by the other one;
        # there are so many because the conversation counts as several of them where it is
        clients = [_Client(url, number) for number in range(_CLIENTS)]
        for client in clients:
            client.start()
        # one that ran there alone would count as the cause
        wait_until(lambda: running(second) >= 3, 60)
        assert second.pid is not None
        os.killpg(second.pid, signal.SIGKILL)
        wait_until(lambda: not replicas(http)[second.url]["ready"])
        for client in clients:
            client.join(300)
        outcomes = [client.outcome for client in clients]
        assert set(outcomes) <= {"whole", "broke off"}, outcomes
        assert all(client.stream for client in clients if client.outcome == "broke off")

        # the conversation stays exact on the other engine
        turns.append(_ask(conversation, "Go on."))
        assert turns[-1].continues(turns[-2])

        # it comes back on its port
        second.stop(progress=quiet)
        second.start()
        second.wait_ready(START_TIMEOUT_S, progress=quiet)
        wait_until(lambda: replicas(http)[second.url]["ready"])

        # and serves alone while the other one is drained
        http.post(f"{_ADMIN}/drain", json={"url": stock.url})
        count = _served(second.url)
        turns.append(_ask(conversation, "On and on."))
        assert turns[-1].continues(turns[-2])
        assert _served(second.url) > count
