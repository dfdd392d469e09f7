"""`AsyncClient` with the methods of `Client`, so that one test runs with both."""

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import start_blocking_portal

from proxy.client import AsyncClient


class BlockingClient(ExitStack):
    """Runs the methods of an `AsyncClient` in an event loop of its own thread."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        self._portal = self.enter_context(start_blocking_portal())
        opened = self._portal.wrap_async_context_manager(AsyncClient(url, **options))
        self._client = self.enter_context(opened)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._iterate(result) if inspect.isasyncgen(result) else self._portal.call(lambda: result)

        return call

    def _iterate(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._portal.call(anext, values)
            except StopAsyncIteration:
                return
