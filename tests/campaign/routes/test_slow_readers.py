"""Hundreds of clients that do not read their streams, and the memory of the proxy."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contract.routes.test_slow_readers import (
    BUFFERED_MIB,
    EVENT,
    LongStreams,
    kernel_bytes,
    send_and_read_nothing,
)
from tests.support.proxy_process import ProxyProcess, run_proxy_process
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import wait_until

_PATIENCE_S = 100.0
"""Hundreds of streams take long on a busy machine."""
_CLIENTS = 200


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[LongStreams]:
    with LongStreams(tiny_model, 64) as engine:
        assert isinstance(engine, LongStreams)
        yield engine


@pytest.fixture(scope="module")
def proxy(engine: LongStreams) -> Iterator[ProxyProcess]:
    with run_proxy_process(engine) as proxy:
        yield proxy


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/tokens"])
def test_clients_that_do_not_read_hold_a_bounded_buffer(
    engine: LongStreams, proxy: ProxyProcess, path: str
) -> None:
    engine.written.clear()
    prompt = {"prompt_ids": [1, 74]} if path.endswith("tokens") else {"messages": [user("Hi")]}
    body = json.dumps({**prompt, "stream": True}).encode()
    before = proxy.memory_mib()
    with ExitStack() as stack:
        for _ in range(_CLIENTS):
            engine.replies.append(EVENT)
            stack.enter_context(send_and_read_nothing(proxy.client.base_url, path, body))
        wait_until(lambda: engine.running == _CLIENTS, _PATIENCE_S)
        _wait_until_nothing_moves(engine)
        assert max(engine.written.values()) < kernel_bytes() + BUFFERED_MIB * 2**20
        assert (proxy.memory_mib() - before) / _CLIENTS < BUFFERED_MIB
        assert engine.running == _CLIENTS
        waits = []
        for number in range(20):
            since = time.monotonic()
            answer = proxy.client.post(CHAT, json={"messages": [user(f"Hi {number}")]})
            waits.append(time.monotonic() - since)
            assert answer.status_code == 200
        assert sorted(waits)[len(waits) // 2] < 1.0
    wait_until(lambda: engine.running == 0, _PATIENCE_S)
    assert engine.aborted >= _CLIENTS


def _wait_until_nothing_moves(engine: LongStreams) -> None:
    """Wait until no stream was sent more for a second."""
    seen, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal seen, since
        if (total := engine.written.total()) != seen:
            seen, since = total, time.monotonic()
        return time.monotonic() - since > 1

    wait_until(still, _PATIENCE_S)
