"""`AsyncClient` with the methods of `Client`, so that one test runs with both."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from proxy.client import AsyncClient


class BlockingClient:
    """Runs the methods of an `AsyncClient` in an event loop of its own thread."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._run(self._open(url, options))

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._iterate(result) if inspect.isasyncgen(result) else self._run(result)

        return call

    async def _open(self, url: str, options: dict[str, Any]) -> AsyncClient:
        return await AsyncClient(url, **options).__aenter__()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _iterate(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._run(anext(values))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
