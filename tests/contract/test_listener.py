"""Bursts of connections and requests: what one pass of the event loop does."""

import asyncio
import itertools
import socket

from tokenproxy.app.listener import ACCEPTS, STARTS, Listener, StartLimit
from tokenproxy.base.types import Receive, Scope, Send


class _Opened(asyncio.Protocol):
    def __init__(self, transports: list[asyncio.BaseTransport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(transport)


async def test_a_burst_of_connections_is_accepted_in_few_passes() -> None:
    """First one at a time, so that several workers share a small burst."""
    bound = socket.create_server(("127.0.0.1", 0), backlog=500)
    clients = [socket.create_connection(bound.getsockname()) for _ in range(300)]
    opened: list[asyncio.BaseTransport] = []
    listener = Listener(bound, lambda: _Opened(opened), None)
    counts = [0]
    while counts[-1] < len(clients):
        await asyncio.sleep(0)
        counts.append(len(opened))
    steps = [later - earlier for earlier, later in itertools.pairwise(counts) if later > earlier]
    assert steps[0] <= 2 and max(steps) <= 2 * ACCEPTS
    assert len(steps) <= 20
    listener.close()
    listener.close()
    for transport in opened:
        transport.abort()  # type: ignore[attr-defined]
    for client in clients:
        client.close()


async def test_requests_start_in_order_a_few_in_a_pass_and_health_checks_at_once() -> None:
    started: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(scope["path"])

    limited = StartLimit(app)

    def request(path: str) -> asyncio.Task[None]:
        scope = {"type": "http", "path": path}
        return asyncio.ensure_future(limited(scope, None, None))  # type: ignore[arg-type]

    paths = [f"/{number}" for number in range(10 * STARTS)]
    tasks = [request(path) for path in paths]
    left = tasks.pop(5 * STARTS)  # its task ends while it waits
    check = request("/health")
    await asyncio.sleep(0)
    assert started == [*paths[:STARTS], "/health"]
    left.cancel()
    late = request("/late")
    passes = 0
    while not late.done():
        before = len(started)
        await asyncio.sleep(0)
        assert len(started) - before <= STARTS
        passes += 1
    del paths[5 * STARTS]
    assert started == [*paths[:STARTS], "/health", *paths[STARTS:], "/late"]
    assert passes <= 15
    await asyncio.gather(check, *tasks)
