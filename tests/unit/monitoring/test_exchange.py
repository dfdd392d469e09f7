"""An observed request is freed at once."""

import asyncio
import gc
import weakref
from typing import Any

from tokenproxy.monitoring.exchange import EXCHANGE_KEY, Monitor, Observer
from tokenproxy.monitoring.metrics import Metrics


async def test_an_exchange_is_freed_without_the_garbage_collector() -> None:
    kept: list[weakref.ref[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kept.append(weakref.ref(scope[EXCHANGE_KEY]))

    async def serve() -> None:
        scope: dict[str, Any] = {"type": "http", "path": "/", "headers": []}

        async def send(message: Any = None) -> Any:
            scope["sent"] = message  # as a server's, which holds the scope

        await Monitor(app, Observer(Metrics()))(scope, send, send)

    gc.disable()
    try:
        await asyncio.create_task(serve())
        await asyncio.sleep(0)  # the event loop holds the context of the task until then
        assert kept[0]() is None
    finally:
        gc.enable()


def test_what_runs_on_a_replica_is_counted_on_when_it_is_looked_up_again() -> None:
    metrics = Metrics()
    with metrics.replica_in_flight("a") as running, metrics.replica_in_flight("a") as again:
        assert running is again
        metrics.report_in_flight()
        assert (
            metrics.registry.get_sample_value("tokenproxy_replica_requests_in_flight", {"replica": "a"}) == 2
        )
