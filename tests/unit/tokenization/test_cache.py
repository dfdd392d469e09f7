import gc
import weakref

import pytest

from chat_tokenizer.cache import BoundedCache, CacheInfo
from chat_tokenizer.errors import TemplateUnsupported, TokenizationError


class _Refusing:
    """A computation that raises an error, and counts its calls."""

    calls = 0

    def __call__(self) -> int:
        self.calls += 1
        raise TemplateUnsupported("refused")


def test_least_recently_used_entry_is_evicted_and_hits_are_counted() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    for key in ("a", "b", "a", "c"):
        cache.get_or_make(key, lambda: 1)
    recomputed = [key for key in ("a", "c", "b") if cache.get_or_make(key, lambda: 2) == 2]
    assert recomputed == ["b"]
    assert cache.info() == CacheInfo(hits=3, misses=4, size=2, max_size=2)


def test_cached_error_is_a_new_object_that_keeps_nothing_of_the_failed_call_alive() -> None:
    """An object that is raised again grows its traceback each time."""
    cache: BoundedCache[str, int] = BoundedCache(2)
    refusing = _Refusing()
    raised = []
    for _ in range(3):
        with pytest.raises(TemplateUnsupported, match="refused") as caught:
            cache.get_or_make("a", refusing, (TokenizationError,))
        raised.append(caught.value)
    assert refusing.calls == 1
    assert len({id(error) for error in raised}) == 3
    call = weakref.ref(refusing)
    del refusing, caught, raised
    gc.collect()
    assert call() is None


def test_large_values_are_not_cached() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2, lambda value: value < 10)
    assert [cache.get_or_make("a", lambda: 10), cache.get_or_make("a", lambda: 1)] == [10, 1]
    cache.put("b", 10)
    assert (cache.get("a"), cache.get("b"), cache.info().size) == (1, None, 1)
