"""The real proxy on a real socket: ASGI transports buffer whole bodies and have no disconnects."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.support.fake_vllm import FakeVllm, Variant
from tokenproxy.app.app import create_app
from tokenproxy.app.connections import connection_options
from tokenproxy.settings import Settings

RETRY_S = 0.05
"""Seconds until the next check of an engine that does not respond; the proxy's own default is longer."""
_PATIENCE_S = 20.0
_NOTHING_KEPT = httpx.Limits(max_keepalive_connections=0)
"""Each request of a test has its own connection, so that none suffers from what another did to it."""


def wait_until(condition: Callable[[], object], patience_s: float = _PATIENCE_S) -> None:
    """Wait until something holds that another thread brings about."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds that another task brings about."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


class _Server(uvicorn.Server):
    """Looks for its end every few milliseconds instead of ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - uvicorn sets a flag from a signal handler
            await asyncio.sleep(0.005)


@contextmanager
def run_server(app: FastAPI, root_path: str = "", **options: Any) -> Iterator[str]:
    """Serve an application from a thread on a free port; yields its URL. `options` are uvicorn's."""
    config = uvicorn.Config(
        app, port=0, root_path=root_path, log_level="warning", timeout_graceful_shutdown=1, **options
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        scheme = "https" if config.is_ssl else "http"
        yield f"{scheme}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_PATIENCE_S)


@contextmanager
def run_app(settings: Settings, retry_s: float = RETRY_S) -> Iterator[httpx.Client]:
    """Serve the proxy; yields a client of it, which knows its address as `base_url`."""
    with (
        run_server(create_app(settings, retry_s=retry_s), **connection_options(settings)) as url,
        httpx.Client(base_url=url, timeout=_PATIENCE_S, trust_env=False, limits=_NOTHING_KEPT) as client,
    ):
        yield client


@contextmanager
def run_proxy(
    engines: Sequence[FakeVllm], *, reader: str | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """Serve the proxy before `engines`, and wait until it knows all of them and their tokenizers.

    Args:
        reader: a key with the scope `read`, where none of the settings is one.
    """
    # 1 s for the store may be too short on a busy machine: a turn would be rendered in place of continued
    settings = {"watch_interval_s": 0.1, "store_timeout_s": 15.0, **settings}
    with run_app(Settings(upstreams=[engine.url for engine in engines], **settings)) as client:
        key = reader or _first_key(settings)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        wait_until(lambda: all(map(_examined, client.get("/ready", headers=headers).json()["engines"])))
        client.get("/v1/sessions")  # after this the proxy knows whether the engine requires credentials
        yield client


def _first_key(settings: dict[str, Any]) -> str:
    """A key that may read the details of /ready; empty if everybody may."""
    keys = settings.get("admin_key") or settings.get("api_key") or ""
    return keys if isinstance(keys, str) else keys[0]


def _examined(engine: dict[str, Any]) -> bool:
    if not engine["ready"] or engine["append"] == "loading":
        return False
    return engine["append"] != "ready" or bool(engine["template"])


@dataclass
class Pair:
    """An engine, and a client of the proxy before it."""

    fake: FakeVllm
    client: httpx.Client

    def settle(self) -> None:
        """Forget what a test did, and wait until the proxy found the engine well again."""
        wait_until(lambda: not self.fake.running)
        self.fake.reset()
        wait_until(lambda: self.client.get("/ready").status_code == 200)


EVERY_SPELLING = pytest.mark.parametrize("pair", [Variant.CHAT, Variant.SCALE_OUT], indirect=True, ids=str)
"""Marks tests of what clients cannot tell apart: how the engine takes ids."""


@contextmanager
def send_and_keep(
    url: httpx.URL, path: str, body: bytes, announced: int | None = None, method: str = "POST"
) -> Iterator[socket.socket]:
    """Send a request and wait for nothing; leaving the block is the client's disconnect."""
    length = len(body) if announced is None else announced
    with socket.create_connection((url.host, url.port or 80), timeout=_PATIENCE_S) as connection:
        head = f"{method} {path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {length}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection
