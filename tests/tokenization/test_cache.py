import pytest

from tokenization.cache import BoundedCache, CacheInfo


def test_hits_and_misses_are_counted() -> None:
    cache: BoundedCache[str, int] = BoundedCache(8)
    assert [cache.get_or_make("a", lambda: 1), cache.get_or_make("a", lambda: 2)] == [1, 1]
    assert cache.info() == CacheInfo(hits=1, misses=1, size=1, max_size=8)


def test_least_recently_used_entry_is_evicted() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    for key in ("a", "b", "a", "c"):
        cache.get_or_make(key, lambda: 1)
    recomputed = [key for key in ("a", "c", "b") if cache.get_or_make(key, lambda: 2) == 2]
    assert recomputed == ["b"]
    assert cache.info().size == 2


def test_errors_are_not_cached() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("a", lambda: 1 // 0)
    assert cache.get_or_make("a", lambda: 1) == 1


def test_large_values_are_not_cached() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2, lambda value: value < 10)
    assert [cache.get_or_make("a", lambda: 10), cache.get_or_make("a", lambda: 1)] == [10, 1]
    cache.put("b", 10)
    assert (cache.get("a"), cache.get("b"), cache.info().size) == (1, None, 1)
