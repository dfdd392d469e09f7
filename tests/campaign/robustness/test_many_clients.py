"""More clients than usual: 2,000 at once, with too few open files, and some that read nothing."""

import asyncio
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import wait_until
from tests.support.wire import send

_PASSED_THROUGH = "/v1/audio/transcriptions"
_REQUESTS = 2_000
_PATIENCE_S = 200.0
_EVENT = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [74]}], "more": "%s"}\n\n'
) % (b"x" * 65_536)
"""Large, so that buffers fill with few events; what is recorded of it is small."""
_LIST = b"GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_STREAM_BYTES = 3 * 2**19
"""What an unread stream may take: mostly the buffers of its two connections."""
_STEADY_BYTES = 8 * 2**20


@contextmanager
def _raised_limit() -> Iterator[None]:
    """This process, which has the clients and the engine, may open files up to the hard limit meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _address(proxy: ServeProcess) -> tuple[str, int]:
    url = httpx.URL(proxy.url)
    return url.host, url.port or 80


def _post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    size = f"content-length: {len(content)}"
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{size}\r\nconnection: close\r\n\r\n".encode() + content
    )


async def _statuses(proxy: ServeProcess, count: int, at_once: int) -> Counter[int]:
    """The statuses of `count` chat completions; 0 for a connection that was closed without a response."""
    free, connecting, statuses = asyncio.Semaphore(at_once), asyncio.Semaphore(100), Counter[int]()
    data = _post(CHAT, {"messages": [user("Hi")]})

    async def one() -> None:
        async with free:
            answer = await send(_address(proxy), data, patience_s=_PATIENCE_S, connecting=connecting)
            statuses.update(answer.statuses or [0])

    await asyncio.gather(*(one() for _ in range(count)))
    return statuses


def test_thousands_of_requests_at_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    """They need more files than the soft limit allows, which the proxy raises itself."""
    with (
        _raised_limit(),
        FakeVllm(tiny_model) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", "--store", "memory:", ulimit="-Sn 1024") as proxy,
    ):
        proxy.wait_ready()
        engine.slow_s[CHAT] = 3.0
        assert asyncio.run(_statuses(proxy, _REQUESTS, _REQUESTS)) == {200: _REQUESTS}
        assert "Traceback" not in proxy.text


def test_too_few_open_files_do_not_eject_the_engine(tiny_model: TinyModel, tmp_path: Path) -> None:
    """800 clients and 1,024 files: what needs one too many is refused, and the engine stays in use."""
    flags = ["--store", "memory:", "--watch-interval-s", "0.2"]
    with (
        FakeVllm(tiny_model) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", *flags, ulimit="-n 1024") as proxy,
    ):
        proxy.wait_ready()
        engine.slow_s[CHAT] = 3.0
        statuses = asyncio.run(_statuses(proxy, 800, 800))
        engine.slow_s.clear()
        assert set(statuses) <= {200, 503, 0}
        assert statuses[200] > 100
        assert statuses[503] + statuses[0] > 100
        assert " is down" not in proxy.text
        assert "Traceback" not in proxy.text
        assert asyncio.run(_statuses(proxy, 50, 10)) == {200: 50}


async def _read_nothing(address: tuple[str, int], data: bytes) -> socket.socket:
    """Send a request, and take nothing of the response from a small buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, address)
    await asyncio.get_running_loop().sock_sendall(connection, data)
    return connection


async def test_clients_that_read_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """500 streams that pass through unread: each takes little memory, and others are served."""
    with (
        FakeVllm(tiny_model) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", "--store", "memory:") as proxy,
    ):
        proxy.wait_ready()
        address, before = _address(proxy), proxy.memory
        engine.endless[_PASSED_THROUGH], engine.endless_pause_s = _EVENT, 0.5
        data = _post(_PASSED_THROUGH, {"stream": True})
        connections = [await _read_nothing(address, data) for _ in range(500)]
        await asyncio.to_thread(wait_until, lambda: engine.running == 500, _PATIENCE_S)
        engine.release()
        grown = [0]
        async with asyncio.timeout(_PATIENCE_S):
            while len(grown) < 10 or grown[-1] - grown[-5] > _STEADY_BYTES:  # until all buffers are full
                assert (await send(address, _LIST, patience_s=20)).statuses == [200]
                grown.append(proxy.memory - before)
                assert grown[-1] < 500 * _STREAM_BYTES
                await asyncio.sleep(1)
        for connection in connections:
            connection.close()
        await asyncio.to_thread(wait_until, lambda: engine.running == 0)
