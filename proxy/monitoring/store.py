"""Wraps any store so that its calls are timed and counted."""

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, cast

from proxy.history.documents import DocumentStore
from proxy.history.feed import FeedStore
from proxy.history.store import Store
from proxy.metrics import Metrics

_NOT_TIMED = frozenset({"open", "aclose"})


def timed_store(store: Store, metrics: Metrics) -> Store:
    """A store that behaves as `store` and reports how long its calls take, and how many wait or run."""
    timed = _Timed(store, Store, metrics)
    timed.feed = _Timed(store.feed, FeedStore, metrics, "feed_")
    timed.documents = _Timed(store.documents, DocumentStore, metrics, "document_")
    return cast(Store, timed)


class _Timed:
    """Delegates every method; each of the protocol's is timed under its name.

    Methods are delegated generically, so that the protocol alone lists them.
    """

    def __init__(self, target: object, protocol: type, metrics: Metrics, prefix: str = "") -> None:
        """`prefix`: before the names of methods in the label `operation`."""
        self._target = target
        self._protocol = protocol
        self._metrics = metrics
        self._prefix = prefix
        self.feed: _Timed | None = None
        self.documents: _Timed | None = None

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if name in _NOT_TIMED or not hasattr(self._protocol, name):
            return attribute
        timed = self._timed(self._prefix + name, attribute)
        setattr(self, name, timed)  # later look-ups find the attribute without calling this method
        return timed

    def _timed(self, operation: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        observe = self._metrics.store_time.labels(operation).observe
        in_flight = self._metrics.store_calls

        async def timed(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            in_flight.inc()
            try:
                return await call(*arguments, **named)
            finally:
                in_flight.dec()
                observe(perf_counter() - began)

        return timed
