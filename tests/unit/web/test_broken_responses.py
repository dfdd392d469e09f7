"""A response that breaks after its first byte ends with an error; no second response begins."""

from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.types import Message
from tokenproxy.monitoring.exchange import EXCHANGE_KEY
from tokenproxy.record.store import StoreError
from tokenproxy.turn.services import RunningRequests
from tokenproxy.web.endpoint import Endpoint


class _Breaking:
    """Both the route and its response."""

    path, methods, label, observed = "/broken", ("GET",), "/broken", False
    needs_tenant, catches_all, body_limit_bytes, store_seconds = False, False, None, 1.0
    status = 200

    def __init__(self, error: Exception, kind: bytes) -> None:
        self.headers = [(b"content-type", kind)]
        self._error = error

    def needed_scope(self, method: str, path: str) -> None:
        """Everybody may read it."""

    async def answer(self, *args: object) -> "_Breaking":
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise self._error

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("error", [EngineBroken("gone"), StoreError("gone")], ids=["engine", "store"])
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_no_second_response_begins(error: Exception, kind: bytes) -> None:
    exchange: Any = SimpleNamespace(status=0, complete=False, leave=lambda: None)
    services: Any = SimpleNamespace(
        running=RunningRequests(), settings=SimpleNamespace(body_limit_bytes=1000, store_timeout_s=1)
    )
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)
        exchange.status = exchange.status or message["status"]

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def tenant_of(scope: object) -> str:
        return ""

    route: Any = _Breaking(error, kind)
    endpoint = Endpoint(route, lambda scope: services, tenant_of)
    scope: Any = {"method": "GET", "path": "/broken", "headers": [], EXCHANGE_KEY: exchange}
    with suppress(EngineBroken, StoreError):  # the server then cuts the connection
        await endpoint(scope, receive, send)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    body = b"".join(message.get("body", b"") for message in sent)
    assert body.startswith(b"data: 1\n\n")
    assert (b'"error"' in body) == (kind == b"text/event-stream")
