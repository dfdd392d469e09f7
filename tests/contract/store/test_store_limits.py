"""What is evicted, and when, for every store alike."""

import time

import pytest
import redis

from tests.support.store_utils import Usage, add, digest_of, entry, make_session, make_turn, opened, usage
from tokenproxy.record.store import Evicted, Limits, Store
from tokenproxy.record.turn import IndexedTurn

_LIMIT = 20_000
_TARGET = 18_000


async def _add(store: Store, rollout: str, turns: int = 1) -> Evicted:
    """Turns of one rollout; its name gives the key of all of them."""
    new = [IndexedTurn(make_turn(rollout), [entry(rollout)]) for _ in range(turns)]
    return await store.add(make_session(rollout), new)


async def _save(store: Store, rollout: str, **fields: object) -> Evicted:
    return await store.add(make_session(rollout, **fields))


async def _evicted(store: Store, keys: list[bytes]) -> set[bytes]:
    """The keys under which a turn was evicted, and no other is."""
    found = (await store.find(keys)).items()
    return {key for key, hits in found if all(each.turn == "" for each in hits.groups[0].candidates)}


async def _names(store: Store) -> list[str]:
    """The rollouts, least recently used first."""
    return [session.id for session in reversed(await store.sessions(limit=1000))]


async def test_adding_evicts_the_least_recently_used(url: str) -> None:
    async with opened(url, Limits(max_bytes=_LIMIT)) as store:
        names = [f"r{number:02}" for number in range(40)]
        rollouts = turns = size = 0
        for added, name in enumerate(names, 1):
            step = await _add(store, name)
            held = await usage(store)
            size = size or held.size
            rollouts, turns = rollouts + step.rollouts, turns + step.turns
            assert held == Usage(added - rollouts, added - turns, (added - rollouts) * size)
            assert step.size == step.rollouts * size and held.size <= _LIMIT
            if step.rollouts:
                assert _TARGET - size < held.size <= _TARGET
        assert 0 < rollouts < 40
        evicted_names, left = names[:rollouts], names[rollouts:]
        assert await _names(store) == left
        keys = [digest_of(name) for name in names]
        assert set(await store.find(keys)) == set(keys)
        assert await _evicted(store, keys) == {digest_of(name) for name in evicted_names}


async def test_what_another_process_evicts_is_not_evicted_twice(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_bytes=_LIMIT)
    async with (
        opened(shared_url) as writer,
        opened(shared_url, limits) as one,
        opened(shared_url, limits) as two,
    ):
        for number in range(80):
            await _add(writer, f"r{number}")
        oldest = two.oldest  # type: ignore[attr-defined]

        async def before_the_other(after: float, limit: int) -> object:
            found = await oldest(after, limit)
            await one.evict()
            return found

        monkeypatch.setattr(two, "oldest", before_the_other)
        assert await two.evict() == Evicted()
        assert _TARGET * 0.9 < (await usage(writer)).size <= _TARGET


async def test_saving_a_session_evicts_whole_rollouts(url: str) -> None:
    async with opened(url, Limits(max_bytes=_LIMIT)) as store:
        for name in ("old", "new"):
            await _add(store, name, 6)
        evicted = await _save(store, "large", defaults=b'{"x":"%s"}' % (b"x" * 6000))
        assert (evicted.rollouts, evicted.turns) == (1, 6)
        assert await _names(store) == ["new", "large"]


async def test_a_pinned_rollout_is_not_evicted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url, Limits(max_bytes=_LIMIT, max_age_s=1000.0)) as store:
        now = time.time()
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: 1000.0)
            for name in ("pinned", "released"):
                await _add(store, name, 4)
            await store.pin("pinned", now + 1000)
            await store.pin("pinned", now - 4000)
            await store.pin("released", now - 0.001)
        for number in range(14):
            await _add(store, f"r{number}")
        names = await _names(store)
        assert names[0] == "pinned" and "released" not in names
        assert await store.evict() == Evicted()
        assert await store.delete("pinned")
        # pinned rollouts may exceed the limit
        await _add(store, "own", 5)
        await store.pin("own", now + 1000)
        await _add(store, "own", 30)
        assert await _names(store) == ["own"]


async def test_old_rollouts_are_evicted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        then = time.time() - 2000.0
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: then)
            await _add(store, "old")
            await _save(store, "empty")
        await _add(store, "young")
        evicted = await store.evict()
        assert (evicted.rollouts, evicted.turns) == (2, 1)
        assert await _names(store) == ["young"]
        assert await _evicted(store, [digest_of("old"), digest_of("young")]) == {digest_of("old")}
        session = await store.session("young")
        assert session is not None and (await usage(store)) == Usage(1, 1, session.size)
        turn = make_turn("again")
    async with opened(url, Limits(max_age_s=-1.0)) as store:
        for again in range(2):  # an evicted rollout may be added again
            await add(store, turn, entry("again", "ids"))
            [group] = (await store.find([digest_of("again")]))[digest_of("again")].groups
            assert [each.turn for each in group.candidates] == [turn.id, ""][: 1 + again]
            assert await store.claim(digest_of("again"), digest_of("ids")) == turn.id
            assert await store.evict() != Evicted() and await store.session("again") is None


async def test_evicted_keys_are_forgotten_after_a_while(redis_url: str, sqlite_url: str) -> None:
    async with opened(sqlite_url, Limits(max_age_s=-1.0, evicted_keys=10)) as store:
        for number in range(25):
            await _add(store, f"r{number:02}")
            await store.evict()
        keys = [digest_of(f"r{number:02}") for number in range(25)]
        assert set(await store.find(keys)) == set(keys[15:])
    async with opened(redis_url, Limits(max_age_s=-1.0)) as store:
        await _add(store, "gone", 3)
        await store.evict()
        await _add(store, "again")
        await store.delete("again")
    with redis.Redis.from_url(redis_url) as client:
        names = {name: client.ttl(name) for name in client.keys("tokenproxy:key:*")}
    assert names.keys() == {b"tokenproxy:key:" + digest_of("gone")} and 0 < min(names.values()) <= 3600
