"""Several processes that share a store: here two stores that are open at once, and one that opens later."""

import asyncio

from tests.support.store_utils import Usage, add, digest_of, entry, make_session, make_turn, opened, usage
from tokenproxy.record.session_rules import count_refusal, read_refusals
from tokenproxy.record.vocabulary import Cause


async def test_one_of_two_gets_a_turn_or_a_value(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        for number in range(10):
            turn, ids = make_turn(completion=b""), str(number)
            await add(first, turn, entry("k", ids))
            both = [store.claim(digest_of("k"), digest_of(ids)) for store in (first, second)]
            assert sorted(map(str, await asyncio.gather(*both))) == sorted(["None", turn.id])
            await second.release(turn.id)
            assert await first.claim(digest_of("k"), digest_of(ids)) == turn.id
            new = (store.put("x", "k", ids.encode(), before=None) for store in (first, second))
            assert sorted(await asyncio.gather(*new)) == [False, True]
            removed = await asyncio.gather(*(store.put("x", "k", None) for store in (first, second)))
            assert sorted(removed) == [False, True]


async def test_refusals_are_counted_however_many_come_at_once(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        await asyncio.gather(*(count_refusal(store, "r", 429, "no") for store in [first, second] * 10))
        assert (await read_refusals(first, "r")).refusals == 20


async def test_changes_are_visible_to_all_at_once(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        turn = make_turn()
        await add(first, turn, entry("k", "ids"))
        assert (await second.find([digest_of("k")]))[digest_of("k")].groups[0].candidates[0].turn == turn.id
        await second.finish("r", Cause.REWARD, {"": 1.0})
        assert (await first.sessions(limit=9))[0].rewards == {"": 1.0}
        await first.put("x", "d", b"{}")
        assert await second.get("x", ["d"]) == {"d": b"{}"}
        assert await second.delete("r")
        assert await first.find([digest_of("k")]) == {}
        assert await usage(first) == Usage(0, 0, 0)


async def test_everything_survives_a_restart(shared_url: str) -> None:
    turn = make_turn()
    async with opened(shared_url) as store:
        await add(store, turn, entry("k", "ids"))
        await store.claim(digest_of("k"), digest_of("ids"))
        await store.finish("r", Cause.REWARD, {turn.id: 0.5})
        await store.add(make_session(metadata=b'{"a":1}'))
        await store.put("x", "d", b"{}")
        session = await store.session("r")
        found = await store.find([digest_of("k")])
    async with opened(shared_url) as store:
        assert await store.path(turn.id) == [turn]
        assert await store.find([digest_of("k")]) == found
        assert await store.get("x") == {"d": b"{}"}
        assert await store.claim(digest_of("k"), digest_of("ids")) is None
        assert session is not None and session.rewards == {turn.id: 0.5}
        assert await store.session("r") == session
