"""What leaves a store, and when."""

import time

import pytest

from proxy.history.store import Evicted, Limits, Session, Store, Usage
from tests.stores.store_utils import key_of, make_response, make_turn, opened

_MOST = 20_000
_GOAL = 18_000


async def _add(store: Store, rollout: str, turns: int = 1) -> Evicted:
    """Turns of one rollout; the rollout's name gives the key of all of them."""
    return await store.add([make_turn(rollout) for _ in range(turns)], [[key_of(rollout)]] * turns)


async def _left(store: Store) -> list[str]:
    return [session.id for session in reversed(await store.sessions(limit=1000))]


async def test_too_many_bytes_drive_the_oldest_out(url: str) -> None:
    async with opened(url, Limits(max_bytes=_MOST)) as store:
        names = [f"r{number:02}" for number in range(40)]
        evicted, one = Evicted(), 0
        for added, name in enumerate(names, 1):
            gone = await _add(store, name)
            usage = await store.usage()
            one = one or usage.size
            evicted = Evicted(
                evicted.rollouts + gone.rollouts, evicted.turns + gone.turns, evicted.size + gone.size
            )
            assert usage == Usage(added - evicted.rollouts, added - evicted.turns, added * one - evicted.size)
            assert usage.size <= _MOST
            if gone.rollouts:
                assert _GOAL - one < usage.size <= _GOAL
        assert 0 < evicted.rollouts < 40
        gone_names, left = names[: evicted.rollouts], names[evicted.rollouts :]
        assert await _left(store) == left
        keys = [key_of(name) for name in names]
        assert set(await store.find(keys)) == {key_of(name) for name in left}
        assert await store.evicted(keys) == {key_of(name) for name in gone_names}


async def test_use_protects(url: str) -> None:
    async with opened(url, Limits(max_bytes=_MOST)) as store:
        for name in ("described", "added", "idle"):
            await _add(store, name, 3)
        await store.save_session(Session(id="described", created=1.0, used=time.time()))
        await _add(store, "added")
        while not (await _add(store, f"{time.time()}")).rollouts:
            pass
        left = await _left(store)
        assert "idle" not in left
        assert left[:2] == ["described", "added"]


async def test_turns_of_a_rollout_leave_together(url: str) -> None:
    async with opened(url, Limits(max_bytes=_MOST)) as store:
        await _add(store, "old", 10)
        await store.set_rewards("old", {"": 1.0})
        gone = await _add(store, "new", 10)
        assert (gone.rollouts, gone.turns) == (1, 10)
        assert await store.turns("old") == []
        assert await store.rewards("old") == {}
        assert len(await store.turns("new")) == 10


async def test_what_is_being_added_leaves_last(url: str) -> None:
    async with opened(url, Limits(max_bytes=_MOST)) as store:
        await _add(store, "other")
        await store.save_session(Session(id="other", created=1.0, used=time.time() + 1000))
        gone = await _add(store, "long", 16)
        assert gone.rollouts == 1 and await _left(store) == ["long"]
        gone = await _add(store, "long", 16)
        assert (gone.rollouts, gone.turns) == (1, 32)
        assert await store.usage() == Usage(0, 0, 0)


async def test_sessions_without_turns_need_no_room(url: str) -> None:
    async with opened(url, Limits(max_bytes=_MOST)) as store:
        for number in range(5):
            await store.save_session(Session(id=f"empty{number}", created=1.0, used=2.0))
        await _add(store, "old", 10)
        await _add(store, "new", 10)
        assert sorted(await _left(store)) == [*(f"empty{number}" for number in range(5)), "new"]


async def test_thousands_of_turns_leave_at_once(url: str) -> None:
    async with opened(url, Limits(max_bytes=10**6)) as store:
        for number in range(600):
            await _add(store, f"r{number:03}", 1)
        await store.add([make_turn("large", completion=b"x" * 950_000)], [[]])
        assert await _left(store) == ["large"]
        assert len(await store.evicted([key_of(f"r{number:03}") for number in range(600)])) == 600


async def test_old_age(url: str) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        for name in ("old", "young"):
            await _add(store, name)
        await store.save_session(Session(id="old", created=1.0, used=time.time() - 2000.0))
        await store.save_session(Session(id="empty", created=1.0, used=time.time() - 2000.0))
        size = (await store.usage()).size // 2
        assert (await store.evict()).turns == 1
        assert await store.evict() == Evicted()
        assert await _left(store) == ["young"]
        assert await store.evicted([key_of("old"), key_of("young")]) == {key_of("old")}
        assert (await store.usage()).size == pytest.approx(size, abs=2)


async def test_many_old_ones(url: str) -> None:
    async with opened(url, Limits(max_age_s=-1.0)) as store:
        for number in range(300):
            await _add(store, f"r{number}", 2)
        assert (await store.evict()).turns == 600
        assert await store.usage() == Usage(0, 0, 0)


async def test_lower_limits_hold_after_a_while(shared_url: str) -> None:
    async with opened(shared_url) as store:
        for number in range(30):
            await _add(store, f"r{number:02}")
    async with opened(shared_url, Limits(max_bytes=_MOST)) as store:
        gone = await store.evict()
        assert gone.rollouts == gone.turns > 0
        assert (await store.usage()).size <= _GOAL


async def test_evicted_keys_are_forgotten_one_day(url: str) -> None:
    async with opened(url, Limits(max_age_s=-1.0, evicted_keys=10)) as store:
        for number in range(25):
            await _add(store, f"r{number:02}")
            await store.evict()
        keys = [key_of(f"r{number:02}") for number in range(25)]
        assert await store.evicted(keys) == set(keys[15:])
        await _add(store, "r16")
        await store.evict()
        await _add(store, "last")
        await store.evict()
        assert key_of("r16") in await store.evicted(keys)


async def test_an_evicted_rollout_may_come_again(url: str) -> None:
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        turn = make_turn()
        for _ in range(2):
            await store.add([turn], [[key_of("k")]])
            await store.save_session(Session(id="r", created=1.0, used=2.0))
            assert (await store.evict()).turns == 1
        await store.add([turn], [[key_of("k")]])
        assert await store.find([key_of("k")]) == {key_of("k"): [turn.id]}
        assert (await store.usage()).turns == 1


async def test_answers_take_no_more_room_than_given(url: str) -> None:
    async with opened(url, Limits(answer_bytes=5000)) as store:
        answers = [make_response(b"k", body=bytes(1000)) for _ in range(10)]
        for answer in answers:
            await store.keep_response(answer)
        left = await store.answers(b"k")
        assert left == answers[:5:-1]
        for answer in left:
            assert await store.take_response(answer)
        for answer in answers[:4]:
            await store.keep_response(answer)
        assert len(await store.answers(b"k")) == 4
        await store.keep_response(make_response(b"k", body=bytes(6000)))
        assert await store.answers(b"k") == []


async def test_answers_grow_old(url: str) -> None:
    async with opened(url, Limits(answer_age_s=-1.0)) as store:
        answers = [make_response(b"k") for _ in range(300)]
        for answer in answers:
            await store.keep_response(answer)
        assert await store.answers(b"k") == []
        assert await store.evict() == Evicted()
        assert not await store.take_response(answers[-1])


async def test_young_answers_stay(url: str) -> None:
    async with opened(url) as store:
        answer = make_response(b"k")
        await store.keep_response(answer)
        await store.evict()
        assert await store.answers(b"k") == [answer]
