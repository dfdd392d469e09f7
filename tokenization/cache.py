"""A small bounded cache, safe across threads, that counts its hits."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheInfo(NamedTuple):
    """How a cache has done since it was made."""

    hits: int
    misses: int
    size: int
    max_size: int


class BoundedCache(Generic[K, V]):
    """Least recently used entries leave when `max_size` entries are exceeded.

    Values are computed outside the lock: two threads that miss the same key at once both compute it,
    which is harmless because a value depends on nothing but its key.
    """

    def __init__(self, max_size: int, small_enough: Callable[[V], bool] = lambda value: True) -> None:
        """`small_enough` says which values are kept: what is large is seldom asked for twice."""
        self._small_enough = small_enough
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._max_size = max_size
        self._hits = 0
        self._misses = 0

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The value under `key`, made by `make` on a miss. What `make` raises is not cached."""
        with self._lock:
            if key in self._entries:
                self._hits += 1
                self._entries.move_to_end(key)
                return self._entries[key]
            self._misses += 1
        value = make()
        self.put(key, value)
        return value

    def get(self, key: K) -> V | None:
        """The value under `key`, or None."""
        with self._lock:
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value under `key`, if it is small enough."""
        if not self._small_enough(value):
            return
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_size:
                self._entries.popitem(last=False)

    def info(self) -> CacheInfo:
        """Hits, misses, entries held and entries allowed."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._max_size)
