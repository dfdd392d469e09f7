"""A client that does not read its stream: the proxy holds a bounded buffer, others do not wait."""

import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from aiohttp import ClientConnectionResetError, web

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_BUFFERED_MIB = 2
"""What the proxy may hold for a client, at most: read from the engine, and not yet taken by the kernel."""
_EVENT = Reply(message={"content": "x" * 20_000})


class _LongStreams(FakeVllm):
    """Its streams go on for `mib`, as fast as they are read."""

    def __init__(self, model: TinyModel, mib: int) -> None:
        super().__init__(model)
        self.streamed = mib * 2**20
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
            while self.written[id(request)] < self.streamed:
                try:
                    await response.write(events[1])
                except ClientConnectionResetError:
                    return response
                self.written[id(request)] += len(events[1])
            settle()
        return response


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


def test_a_client_that_reads_late_holds_a_bounded_buffer_and_gets_all(tiny_model: TinyModel) -> None:
    bound = _kernel_bytes() + _BUFFERED_MIB * 2**20
    engine = _LongStreams(tiny_model, bound // 2**20 + 2)
    with engine, run_proxy([engine], store="memory:") as client:
        engine.replies.append(_EVENT)
        body = json.dumps({"messages": [user("late")], "stream": True}).encode()
        with _send_and_read_nothing(client.base_url, CHAT, body) as connection:
            wait_until(lambda: engine.running == 1)
            seen: list[int] = []
            while seen[-5:] != [engine.written.total()] * 5:
                seen.append(engine.written.total())
                other = {"messages": [user(f"Hi {len(seen)}")]}
                assert client.post(CHAT, json=other).status_code == 200
            assert engine.running == 1
            assert seen[-1] < bound
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
            while engine.running:
                assert connection.recv(2**20)
        assert engine.written.total() >= engine.streamed
