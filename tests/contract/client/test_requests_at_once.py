"""Clients that many threads or tasks use at the same time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from proxy.client import Client
from tests.contract.client.blocking import BlockingClient

_AT_ONCE = 150
_MODELS = b'{"object": "list", "data": []}'


class _Server(ThreadingHTTPServer):
    """Responds to no request before all of them are there."""

    request_queue_size = _AT_ONCE

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.all_there = threading.Barrier(_AT_ONCE)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        try:
            self.server.all_there.wait(30)
        except threading.BrokenBarrierError:
            self.send_error(504)
            return
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(_MODELS)))
        self.end_headers()
        self.wfile.write(_MODELS)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


@contextmanager
def _serve() -> Iterator[str]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("make", [Client, BlockingClient], ids=["blocking", "asyncio"])
def test_no_request_waits_for_another(make: Callable[..., Any]) -> None:
    with _serve() as url, make(url) as client, ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in range(2):  # the second time on the connections of the first
            found = [threads.submit(client.models) for _ in range(_AT_ONCE)]
            assert [each.result() for each in found] == [[]] * _AT_ONCE
