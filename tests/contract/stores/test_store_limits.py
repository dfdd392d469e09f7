"""What is evicted, and when, for every store alike."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import pytest

from proxy.history.store import Evicted, Limits, Store, Usage
from proxy.stores.eviction import STEP, add_evicted, evict_in_steps
from tests.support.store_utils import add, digest_of, entry, make_response, make_session, make_turn, opened

_LIMIT = 20_000
_TARGET = 18_000
_HEAVY = b'{"x":"%s"}' % (b"x" * 3000)


async def _add(store: Store, rollout: str, turns: int = 1) -> Evicted:
    """Turns of one rollout; its name gives the key of all of them."""
    return await store.add(
        make_session(rollout), [make_turn(rollout) for _ in range(turns)], [[entry(rollout)]] * turns
    )


async def _save(store: Store, rollout: str, **fields: object) -> Evicted:
    return await store.save_session(make_session(rollout, **fields))


async def _names(store: Store) -> list[str]:
    """The rollouts, least recently used first."""
    return [session.id for session in reversed(await store.sessions(limit=1000))]


async def test_adding_evicts_the_least_recently_used(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_bytes=_LIMIT)) as store:
        names = [f"r{number:02}" for number in range(40)]
        evicted, size = Evicted(), 0
        for added, name in enumerate(names, 1):
            step = await _add(store, name)
            usage = await store.usage()
            size = size or usage.size
            evicted = add_evicted(evicted, step)
            assert usage == Usage(
                added - evicted.rollouts, added - evicted.turns, added * size - evicted.size
            )
            assert usage.size <= _LIMIT
            if step.rollouts:
                assert _TARGET - size < usage.size <= _TARGET
        assert 0 < evicted.rollouts < 40
        evicted_names, left = names[: evicted.rollouts], names[evicted.rollouts :]
        assert await _names(store) == left
        keys = [digest_of(name) for name in names]
        assert set(await store.find(keys)) == {digest_of(name) for name in left}
        assert await store.evicted(keys) == {digest_of(name) for name in evicted_names}


async def test_saving_a_session_evicts_whole_rollouts(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_bytes=_LIMIT)) as store:
        await _add(store, "old", 5)
        await store.set_rewards("old", {"": 1.0})
        await _add(store, "new", 5)
        assert await _save(store, "small", metadata=_HEAVY) == Evicted()
        before = (await store.usage()).size
        evicted = await _save(store, "large", defaults=_HEAVY, overrides=_HEAVY)
        assert (evicted.rollouts, evicted.turns) == (1, 5)
        assert (await store.usage()).size == before + 2 * len(_HEAVY) + 2 - evicted.size <= _TARGET
        assert await _names(store) == ["new", "small", "large"]
        assert (await store.turns("old"), await store.rewards("old")) == ([], {})
        # a longer description of one that exists, and sessions without turns
        await _save(store, "new", metadata=_HEAVY)
        for number in range(20):
            await _save(store, f"r{number}", metadata=_HEAVY)
        names = await _names(store)
        assert 4 <= len(names) <= 6 and names == [f"r{number}" for number in range(20)][-len(names) :]
        await _add(store, "turns", 13)
        assert await _names(store) == ["turns"]


async def test_use_protects_from_eviction(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_bytes=_LIMIT)) as store:
        for name in ("described", "added", "pinned", "idle"):
            await _add(store, name, 2)
        await _save(store, "described")
        await _add(store, "added")
        await store.pin("pinned", 0.0)
        while not (await _add(store, f"{time.time()}")).rollouts:
            pass
        left = await _names(store)
        assert "idle" not in left
        assert left[:3] == ["described", "added", "pinned"]


async def test_a_pinned_rollout_is_not_evicted(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_bytes=_LIMIT, max_age_s=1000.0)) as store:
        for name in ("pinned", "released", "described"):
            await _add(store, name, 4)
        later = time.time() + 1000
        await store.pin("pinned", later)
        await store.pin("pinned", later - 5000)
        await store.pin("released", time.time() - 0.001)
        await store.pin("described", later)
        for name in ("pinned", "released", "described"):
            await _save(store, name, used=1000.0)
        for number in range(10):
            await _add(store, f"r{number}")
        names = await _names(store)
        assert names[:2] == ["described", "pinned"] and "released" not in names
        assert await store.evict() == Evicted()
        assert await store.delete("pinned")
        await _add(store, "pinned")
        await _save(store, "pinned", used=1000.0)
        assert (await store.evict()).turns == 1
        # pinned rollouts may exceed the limit
        await store.pin("own", later)
        await _add(store, "own", 5)
        await store.pin("own", later)
        await _add(store, "own", 30)
        assert await _names(store) == ["described", "own"]


async def test_many_pinned_rollouts_hide_no_old_one(url: str) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        names = [f"r{number}" for number in range(30)]
        for used, name in enumerate(names):
            await _save(store, name, used=float(used))
            if name != "r29":
                await store.pin(name, time.time() + 1000)
                await _save(store, name, used=float(used))
        assert await store.evict() == Evicted(1, 0, 6)
        assert await _names(store) == names[:-1]


async def test_the_added_rollout_is_evicted_last(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_bytes=_LIMIT)) as store:
        await _add(store, "other")
        for left in (["long"], []):
            await _save(store, "other", used=time.time() + 1000)
            assert (await _add(store, "long", 16)).rollouts == 2 - len(left)
            assert await _names(store) == left
        # one description exceeds the limit alone
        assert await _save(store, "r", metadata=b" " * _LIMIT) == Evicted(1, 0, _LIMIT + 4)
        assert await store.usage() == Usage(0, 0, 0)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_eviction_goes_in_short_steps_one_at_a_time(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Evicted] = []
    running = 0

    async def evict_and_note(lock: asyncio.Lock, step: Callable[[], Awaitable[Evicted]]) -> Evicted:
        async def noted() -> Evicted:
            nonlocal running
            running += 1
            assert running == 1
            steps.append(await step())
            running -= 1
            return steps[-1]

        return await evict_in_steps(lock, noted)

    monkeypatch.setattr(f"proxy.stores.{kind}.evict_in_steps", evict_and_note)
    async with opened(request.getfixturevalue(f"{kind}_url"), Limits(max_bytes=10**6)) as store:
        turns = [make_turn(f"r{number}", completion=b"") for number in range(600)]
        await asyncio.gather(*(add(store, turn) for turn in turns))
        large = [make_turn(f"large{number}", completion=os.urandom(600_000)) for number in range(3)]
        await asyncio.gather(*(add(store, turn) for turn in large))
        assert (await store.usage()).size <= 10**6
        for name in await _names(store):
            await _save(store, name, used=1.0)
        await store.evict()
    assert sum(step.turns for step in steps) == 603
    assert all(step.rollouts + step.turns <= STEP + 1 for step in steps)


async def test_old_rollouts_are_evicted(url: str) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        turn = make_turn("again")
        for _ in range(2):  # an evicted rollout may be added again
            await add(store, turn, entry("again", "ids"))
            await store.claim(turn.id)
            await _save(store, "again", used=2.0)
            assert (await store.evict()).turns == 1
        for name in ("old", "young"):
            await _add(store, name)
        await _save(store, "old", used=time.time() - 2000.0)
        await _save(store, "empty", used=time.time() - 2000.0)
        evicted = await store.evict()
        assert (evicted.rollouts, evicted.turns) == (2, 1)
        assert await store.evict() == Evicted()
        assert await _names(store) == ["young"]
        assert await store.evicted([digest_of("old"), digest_of("young")]) == {digest_of("old")}
        session = await store.session("young")
        assert session is not None and (await store.usage()) == Usage(1, 1, session.size)
        await add(store, turn, entry("again", "ids"))
        found = (await store.find([digest_of("again")]))[digest_of("again")]
        assert found.total == 1 and found.groups[0].candidates[0].open


async def test_evicted_keys_are_forgotten_after_a_while(whole_url: str) -> None:
    async with opened(whole_url, Limits(max_age_s=-1.0, evicted_keys=10)) as store:
        for number in range(25):
            await _add(store, f"r{number:02}")
            await store.evict()
        keys = [digest_of(f"r{number:02}") for number in range(25)]
        assert await store.evicted(keys) == set(keys[15:])
        await _add(store, "r16")
        await store.evict()
        await _add(store, "last")
        await store.evict()
        assert digest_of("r16") in await store.evicted(keys)


async def test_responses_keep_their_limit(whole_url: str) -> None:
    async with opened(whole_url, Limits(response_bytes=5000)) as store:
        responses = [make_response(b"k", body=bytes(1000)) for _ in range(10)]
        for response in responses:
            await store.keep_response(response)
        await store.evict()
        left = await store.responses(b"k")
        assert left == responses[:5:-1]
        for response in left:
            assert await store.take_response(response)
        for response in responses[:4]:
            await store.keep_response(response)
        assert len(await store.responses(b"k")) == 4
        await store.keep_response(make_response(b"k", body=bytes(6000)))
        assert await store.responses(b"k") == []


async def test_old_responses_are_dropped(url: str) -> None:
    async with opened(url, Limits(response_age_s=-1.0)) as store:
        responses = [make_response(b"k") for _ in range(600)]
        await asyncio.gather(*map(store.keep_response, responses))
        assert await store.responses(b"k") == []
        assert await store.evict() == Evicted()
        assert not await store.take_response(responses[-1])


@pytest.mark.parametrize("max_bytes", [0, 1])
async def test_a_store_with_a_limit_of_nothing_holds_only_changes_of_replicas(
    url: str, max_bytes: int
) -> None:
    async with opened(url, Limits(max_bytes=max_bytes, response_bytes=0, evicted_keys=0)) as store:
        assert (await _add(store, "r")).turns == 1
        await store.keep_response(make_response(b"k"))
        await store.change_replica("fleet", "http://a:1", "removed")
        await store.evict()
        assert await store.usage() == Usage(0, 0, 0)
        assert (await store.responses(b"k"), await store.evicted([digest_of("r")])) == ([], set())
        assert await store.replica_changes("fleet") == {"http://a:1": "removed"}
