"""Wraps any store so that its calls are timed and counted."""

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, cast

from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Store

_NOT_TIMED = frozenset({"open", "aclose", "limits"})


def timed_store(store: Store, metrics: Metrics) -> Store:
    """A store that behaves as `store` and reports how long its calls take, and how many wait or run."""
    return cast(Store, _Timed(store, metrics))


class _Timed:
    """Delegates every method; each of the protocol's is timed under its name.

    Methods are delegated generically, so that the protocol alone lists them.
    """

    def __init__(self, target: Store, metrics: Metrics) -> None:
        self._target = target
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if name in _NOT_TIMED or not hasattr(Store, name):
            return attribute
        timed = self._timed(name, attribute)
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
