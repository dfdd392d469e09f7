"""Several processes that share a store: here two stores that are open at once, and one that opens later."""

import asyncio

from proxy.history.store import SECRET_BYTES, Usage
from tests.support.store_utils import add, digest_of, entry, make_response, make_session, make_turn, opened


async def test_one_of_two_gets_a_turn_or_a_response(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        for _ in range(10):
            turn, response = make_turn(completion=b""), make_response(b"k")
            await add(first, turn)
            claimed = await asyncio.gather(first.claim(turn.id), second.claim(turn.id))
            assert sorted(claimed) == [False, True]
            await second.release(turn.id)
            assert await first.claim(turn.id)
            await first.keep_response(response)
            taken = await asyncio.gather(first.take_response(response), second.take_response(response))
            assert sorted(taken) == [False, True]
        assert await first.responses(b"k") == []


async def test_changes_are_visible_to_all_at_once(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        secrets = await asyncio.gather(first.secret(), second.secret(), first.secret())
        assert len(secrets[0]) == SECRET_BYTES and len(set(secrets)) == 1
        turn = make_turn()
        await add(first, turn, entry("k", "ids"))
        assert (await second.find([digest_of("k")]))[digest_of("k")].groups[0].candidates[0].turn == turn.id
        await second.set_rewards("r", {"": 1.0})
        assert await first.rewards("r") == {"": 1.0}
        await add(second, make_turn("other"), entry("k", "ids"))
        session = await first.session("r")
        assert session is not None and session.ambiguous
        await first.change_replica("fleet", "http://a:1", "removed")
        assert await second.replica_changes("fleet") == {"http://a:1": "removed"}
        await first.documents.keep("d", b"{}")
        assert await second.documents.read(["d"]) == {"d": b"{}"}
        assert await second.delete("r") and await second.delete("other")
        assert await first.find([digest_of("k")]) == {}
        assert await first.usage() == Usage(0, 0, 0)


async def test_everything_survives_a_restart(shared_url: str) -> None:
    turn, response = make_turn(), make_response(b"k")
    async with opened(shared_url) as store:
        secret = await store.secret()
        await add(store, turn, entry("k", "ids"))
        await store.claim(turn.id)
        await store.set_rewards("r", {turn.id: 0.5})
        await store.save_session(make_session(metadata=b'{"a":1}'))
        await store.keep_response(response)
        await store.change_replica("fleet", "http://a:1", "removed")
        await store.documents.keep("d", b"{}")
        session, usage = await store.session("r"), await store.usage()
        found = await store.find([digest_of("k")])
    async with opened(shared_url) as store:
        assert await store.secret() == secret
        assert await store.path(turn.id) == [turn]
        assert await store.find([digest_of("k")]) == found
        assert await store.rewards("r") == {turn.id: 0.5}
        assert await store.responses(b"k") == [response]
        assert await store.replica_changes("fleet") == {"http://a:1": "removed"}
        assert await store.documents.read(["d"]) == {"d": b"{}"}
        assert (await store.session("r"), await store.usage()) == (session, usage)
