"""A thread-safe LRU cache that counts hits and misses, and its keys."""

import hashlib
import json
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from chat_tokenizer.errors import InvalidMessages

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheInfo(NamedTuple):
    """Hits and misses of a cache since it was created, its entries now, and its limit."""

    hits: int
    misses: int
    size: int
    max_size: int


class BoundedCache(Generic[K, V]):
    """Evicts the least recently used entry when it holds more than `max_size`.

    Values are computed outside the lock. Two threads that miss the same key at once both compute its value,
    which is harmless because a value depends on its key alone.
    """

    def __init__(self, max_size: int, small_enough: Callable[[V], bool] = lambda value: True) -> None:
        """Cache at most `max_size` values, and only those for which `small_enough` returns True.

        Large values would fill the memory, and are seldom needed twice.
        """
        self._small_enough = small_enough
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._max_size = max_size
        self._hits = 0
        self._misses = 0

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`; on a miss, call `make` and cache its result. Errors are not cached."""
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
        """Return the value of `key`, or None if it has none. Does not count."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Store a value under `key`, if it is small enough."""
        if not self._small_enough(value):
            return
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_size:
                self._entries.popitem(last=False)

    def info(self) -> CacheInfo:
        """The counters and sizes of this cache."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._entries), self._max_size)


def digest(*parts: object) -> bytes:
    """A 16-byte cache key for JSON-like values. The order of keys in objects counts: templates print it.

    Raises:
        InvalidMessages: a value is nested too deep.
    """
    return hashlib.blake2b(serialized(parts), digest_size=16).digest()


def serialized(values: Any) -> bytes:
    """JSON-like values as bytes in which each text is found as UTF-8.

    Equal values with their keys in the same order give equal bytes.

    Raises:
        InvalidMessages: a value is nested too deep, or holds itself.
    """
    try:
        # a tenth of the time of JSON; version 0, because later ones depend on which objects are identical
        return marshal.dumps(values, 0)
    except ValueError:
        try:
            text = json.dumps(values, ensure_ascii=False, default=repr)
        except RecursionError as error:
            raise InvalidMessages("the messages, tools or template arguments are nested too deep") from error
        except (ValueError, TypeError) as error:
            raise InvalidMessages(f"messages, tools or template arguments are not JSON: {error}") from error
        return text.encode("utf-8", "surrogatepass")
