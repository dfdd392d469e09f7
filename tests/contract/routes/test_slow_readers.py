"""Clients that do not read their streams: each holds a bounded buffer, and other requests do not wait."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import ClientConnectionResetError, web

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.proxy_process import ProxyProcess, run_proxy_process
from tests.support.tiny_model import TinyModel
from tests.support.utils import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.waits]

_PATIENCE_S = 100.0
"""A hundred streams take long on a busy machine."""
_CLIENTS = 200
_STREAMED_MIB = 64
"""What the engine sends to each client that reads."""
_BUFFERED_MIB = 2
"""What the proxy may hold for a client, at most: read from the engine, and not yet taken by the kernel."""


class LongStreams(FakeVllm):
    """Its streams go on for `_STREAMED_MIB`, as fast as they are read."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(model)
        self.written: Counter[int] = Counter()
        """Bytes of each stream that were sent."""

    async def _finish(
        self, request: web.Request, reply: Reply, events: list[bytes], kind: str = "text/event-stream"
    ) -> web.StreamResponse:
        if kind != "text/event-stream":
            return await super()._finish(request, reply, events, kind)
        response = web.StreamResponse(headers={"content-type": kind})
        async with self._counted() as settle:
            await response.prepare(request)
            while self.written[id(request)] < _STREAMED_MIB * 2**20:
                try:
                    await response.write(events[1])
                except ClientConnectionResetError:
                    return response
                self.written[id(request)] += len(events[1])
            settle()
        return response


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[LongStreams]:
    engine = LongStreams(tiny_model)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def proxy(engine: LongStreams) -> Iterator[ProxyProcess]:
    with run_proxy_process(engine) as proxy:
        yield proxy


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/tokens"])
def test_clients_that_do_not_read_hold_a_bounded_buffer(
    engine: LongStreams, proxy: ProxyProcess, path: str
) -> None:
    engine.written.clear()
    prompt = {"prompt_ids": [1, 74]} if path.endswith("tokens") else {"messages": [_user("Hi")]}
    body = json.dumps({**prompt, "stream": True}).encode()
    before = proxy.memory_mib()
    with ExitStack() as stack:
        for _ in range(_CLIENTS):
            # events of 10 kB
            engine.replies.append(Reply(message={"content": "x" * 10_000}))
            stack.enter_context(_send_and_read_nothing(proxy.client.base_url, path, body))
        wait_until(lambda: engine.running == _CLIENTS, _PATIENCE_S)
        _wait_until_nothing_moves(engine)
        assert max(engine.written.values()) < _kernel_bytes() + _BUFFERED_MIB * 2**20
        held = (proxy.memory_mib() - before) / _CLIENTS
        assert held < _BUFFERED_MIB
        assert engine.running == _CLIENTS
        waits = []
        for number in range(20):
            since = time.monotonic()
            answer = proxy.client.post("/v1/chat/completions", json={"messages": [_user(f"Hi {number}")]})
            waits.append(time.monotonic() - since)
            assert answer.status_code == 200
        assert sorted(waits)[len(waits) // 2] < 1.0
    wait_until(lambda: engine.running == 0, _PATIENCE_S)
    assert engine.aborted >= _CLIENTS


def test_a_client_that_reads_late_gets_all(engine: LongStreams, proxy: ProxyProcess) -> None:
    engine.written.clear()
    engine.replies.append(Reply(message={"content": "x" * 10_000}))
    body = json.dumps({"messages": [_user("late")], "stream": True}).encode()
    with _send_and_read_nothing(proxy.client.base_url, "/v1/chat/completions", body) as connection:
        wait_until(lambda: engine.running == 1)
        _wait_until_nothing_moves(engine)
        assert engine.running == 1
        received = 0
        while engine.running:
            received += len(_receive(connection))
        assert received > 0
        assert sum(engine.written.values()) >= _STREAMED_MIB * 2**20


@contextmanager
def _send_and_read_nothing(url: httpx.URL, path: str, body: bytes) -> Iterator[socket.socket]:
    """Send a request. The kernel takes in little of the answer: what is not read stays at the proxy."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((url.host, url.port))
        head = f"POST {path} HTTP/1.1\r\nhost: proxy\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


def _kernel_bytes() -> int:
    """What the kernel takes in for both ends of the connection between engine and proxy, at most."""
    folder = Path("/proc/sys/net/ipv4")
    return sum(int((folder / name).read_text().split()[2]) for name in ("tcp_rmem", "tcp_wmem"))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _receive(connection: socket.socket) -> bytes:
    return connection.recv(2**20)


def _wait_until_nothing_moves(engine: LongStreams) -> None:
    """Wait until no stream was sent more for a second."""
    seen, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal seen, since
        if (total := engine.written.total()) != seen:
            seen, since = total, time.monotonic()
        return time.monotonic() - since > 1

    wait_until(still, _PATIENCE_S)
