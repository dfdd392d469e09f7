from chat_tokenizer.cache import BoundedCache, CacheInfo


def test_least_recently_used_entry_is_evicted_and_hits_are_counted() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    for key in ("a", "b", "a", "c"):
        cache.get_or_make(key, lambda: 1)
    recomputed = [key for key in ("a", "c", "b") if cache.get_or_make(key, lambda: 2) == 2]
    assert recomputed == ["b"]
    assert cache.info() == CacheInfo(hits=3, misses=4, size=2, max_size=2)


def test_an_entry_that_was_only_looked_up_was_used() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    for key in ("a", "b"):
        cache.put(key, 1)
    assert cache.get("a") == 1
    cache.put("c", 1)
    assert (cache.get("a"), cache.get("b")) == (1, None)


def test_large_values_are_not_cached() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2, lambda value: value < 10)
    assert [cache.get_or_make("a", lambda: 10), cache.get_or_make("a", lambda: 1)] == [10, 1]
    cache.put("b", 10)
    assert (cache.get("a"), cache.get("b"), cache.info().size) == (1, None, 1)
