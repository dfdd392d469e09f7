"""More clients than usual: all at once, with too few open files, and some that read nothing."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.tiny_model import TinyModel
from tests.support.utils import wait_until
from tests.support.wire import send

pytestmark = [pytest.mark.slow, pytest.mark.alone]

_CHAT, _PASSED_THROUGH = "/v1/chat/completions", "/v1/audio/transcriptions"
_HI = [{"role": "user", "content": "Hi"}]
_REQUESTS = 10_001
_PATIENCE_S = 200.0
_EVENT = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [74]}], "more": "%s"}\n\n'
) % (b"x" * 65_536)
"""Large, so that buffers fill with few events; what is recorded of it is small."""
_LIST = b"GET /v1/sessions HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n"
_STREAM_BYTES = 3 * 2**19
"""What an unread stream may take: mostly the buffers of its two connections."""
_STEADY_BYTES = 8 * 2**20
_SPARE_FILES = 4000
"""Files that the proxy has open besides: a new connection to an engine starts with a check on another."""


_ENGINE = """
import sys
import time
sys.modules["torch"] = None
from tests.campaign.robustness.engine_process import main
main()
"""


@contextmanager
def _gated_engine(model: TinyModel, count: int) -> Iterator[str]:
    """An engine that answers when `count` requests have arrived."""
    command = [sys.executable, "-c", _ENGINE, str(model.folder), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def raised_limit() -> Iterator[int]:
    """The hard limit on open files, which this process may use up meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard if hard != resource.RLIM_INFINITY else 2**20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _address(proxy: ServeProcess) -> tuple[str, int]:
    url = httpx.URL(proxy.url)
    return url.host, url.port or 80


def _post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: proxy\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _statuses(address: tuple[str, int], data: bytes, count: int, at_once: int) -> Counter[int]:
    """The statuses of `count` equal requests; 0 for a connection that was closed without a response."""
    free, connecting, statuses = asyncio.Semaphore(at_once), asyncio.Semaphore(100), Counter[int]()

    async def one() -> None:
        async with free:
            answer = await send(address, data, patience_s=_PATIENCE_S, connecting=connecting)
            statuses.update(answer.statuses or [0])

    await asyncio.gather(*(one() for _ in range(count)))
    return statuses


def test_ten_thousand_requests_at_once(tiny_model: TinyModel, tmp_path: Path, raised_limit: int) -> None:
    """As many at once as the limit on open files allows, which the proxy raises itself."""
    at_once = min(_REQUESTS, (raised_limit - _SPARE_FILES) // 2)
    data = _post(_CHAT, {"messages": _HI})
    # all of them on one engine; a connection to it may take long while two cores open 20,000 of them
    flags = ["--store", "memory:", "--replica-requests", str(_REQUESTS), "--connect-timeout-s", "240"]
    with (
        _gated_engine(tiny_model, at_once) as engine,
        ServeProcess([engine], tmp_path / "proxy.log", *flags, ulimit="-Sn 1024") as proxy,
    ):
        proxy.wait_ready()
        statuses = asyncio.run(_statuses(_address(proxy), data, _REQUESTS, at_once))
        assert statuses == {200: _REQUESTS}
        assert "Traceback" not in proxy.text


def test_too_few_open_files_do_not_eject_the_engine(tiny_model: TinyModel, tmp_path: Path) -> None:
    """800 clients and 1,024 files: what needs one too many is refused, and the engine stays in use."""
    flags = ["--store", "memory:", "--watch-interval-s", "0.2"]
    data = _post(_CHAT, {"messages": _HI})
    with (
        FakeVllm(tiny_model) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", *flags, ulimit="-n 1024") as proxy,
    ):
        proxy.wait_ready()
        engine.slow_s[_CHAT] = 3.0
        statuses = asyncio.run(_statuses(_address(proxy), data, 800, 800))
        engine.slow_s.clear()
        assert set(statuses) <= {200, 503, 0}
        assert statuses[200] > 100
        assert statuses[503] + statuses[0] > 100
        assert " is down" not in proxy.text
        assert "Traceback" not in proxy.text
        assert asyncio.run(_statuses(_address(proxy), data, 50, 10)) == {200: 50}


async def _read_nothing(address: tuple[str, int], data: bytes) -> socket.socket:
    """Send a request, and take nothing of the response from a small buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, address)
    await asyncio.get_running_loop().sock_sendall(connection, data)
    return connection


async def test_clients_that_read_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """500 streams that pass through unread: each takes little memory, and others are served.

    `tests/contract/routes/test_slow_readers.py` has those that are recorded.
    """
    with (
        FakeVllm(tiny_model) as engine,
        ServeProcess([engine.url], tmp_path / "proxy.log", "--store", "memory:") as proxy,
    ):
        proxy.wait_ready()
        address, before = _address(proxy), proxy.memory
        engine.endless[_PASSED_THROUGH], engine.endless_pause_s = _EVENT, 0.5
        data = _post(_PASSED_THROUGH, {"stream": True})
        connections = [await _read_nothing(address, data) for _ in range(500)]
        async with asyncio.timeout(_PATIENCE_S):
            while engine.running < 500:  # noqa: ASYNC110 - in another thread
                await asyncio.sleep(0.1)
        engine.release()
        grown = [0]
        async with asyncio.timeout(_PATIENCE_S):
            while len(grown) < 10 or grown[-1] - grown[-5] > _STEADY_BYTES:  # until all buffers are full
                answer = await send(address, _LIST, patience_s=20)
                assert answer.statuses == [200]
                grown.append(proxy.memory - before)
                assert grown[-1] < 500 * _STREAM_BYTES
                await asyncio.sleep(1)
        for connection in connections:
            connection.close()
        await asyncio.to_thread(wait_until, lambda: engine.running == 0)
