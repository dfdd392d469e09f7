"""What a Redis store does that only data in partitions, or a cluster, can show."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from proxy.history.feed import Cause
from proxy.history.store import Limits, StoreError, StoreUnusable
from proxy.stores.redis_partitions import SLOTS, hash_tags
from proxy.stores.urls import make_store
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import run_sentinel
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened


def _keys(url: str) -> set[bytes]:
    with redis.Redis.from_url(url) as client:
        return set(client.keys())


@pytest.mark.parametrize("partitions", [1, 3, 1024])
def test_partitions_are_spread_evenly_over_all_slots(partitions: int) -> None:
    tags = hash_tags(partitions)
    slots = [key_slot(b"tokenproxy:{%s}:used" % tag.encode()) for tag in tags]
    assert slots == [(2 * number + 1) * SLOTS // (2 * partitions) for number in range(partitions)]


@pytest.mark.parametrize("options", ["", "?partitions=3"])
async def test_a_session_is_in_one_slot_and_leaves_no_names(redis_url: str, options: str) -> None:
    async with opened(redis_url + options) as store:
        before = _keys(redis_url)
        session, turns = make_session("t/r", tenant="t"), [make_turn("t/r"), make_turn("t/r")]
        await store.add(session, turns, [[entry("a", "ids"), entry("b")], [entry("b")]])
        await store.set_rewards("t/r", {"": 1.0})
        await store.pin("t/r", 2e9)
        await store.claim(turns[0].id)
        assert len({key_slot(key) for key in _keys(redis_url) - before}) == 1 or not options
        await store.delete("t/r")
        left = {key.rpartition(b":")[2] for key in _keys(redis_url) - before}
        assert left <= {b"totals", b"feed_state"}


async def test_the_number_of_partitions_stays(redis_url: str) -> None:
    async with opened(f"{redis_url}?partitions=5") as store:
        await add(store, make_turn())
    with pytest.raises(StoreUnusable, match="5 partitions, and its URL tells 6: set partitions=5"):
        await make_store(f"{redis_url}?partitions=6", Limits()).open()
    with pytest.raises(StoreUnusable, match=r"5 partitions: add \?partitions=5 to its URL"):
        await make_store(redis_url, Limits()).open()


async def test_data_that_are_not_split_stay_so(redis_url: str) -> None:
    async with opened(redis_url) as store:
        await add(store, make_turn())
    with pytest.raises(StoreUnusable, match="not split into partitions: leave `partitions` out"):
        await make_store(f"{redis_url}?partitions=2", Limits()).open()
    async with opened(redis_url) as store:
        assert (await store.usage()).turns == 1


async def test_a_cluster_of_three(cluster_url: str, redis_cluster: RedisCluster, redis_port: int) -> None:
    """Sessions are spread over all masters, and any of the named hosts is enough to find them."""
    turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
    async with opened(cluster_url) as store:
        await asyncio.gather(*(add(store, turn, entry("k", "ids")) for turn in turns))
    assert all(len(master.call("KEYS", "*turn:*")) > 5 for master in redis_cluster.masters)
    async with opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{redis_cluster.masters[1].port}") as store:
        assert (await store.find([digest_of("k")]))[digest_of("k")].total == (await store.usage()).turns == 60
        assert [await store.path(turn.id) for turn in turns] == [[turn] for turn in turns]
    for wrong, message in (
        (f"redis+cluster://127.0.0.1:{redis_port}", f"{redis_port}: .*is it a cluster"),
        *(
            (f"redis://127.0.0.1:{node.port}", "its URL begins with redis\\+cluster://")
            for node in redis_cluster.masters
        ),
    ):
        store = make_store(wrong, Limits())
        with pytest.raises(StoreError, match=message):
            await store.open()
        await store.aclose()


@pytest.mark.parametrize("seed", range(2))
async def test_partitions_find_what_one_database_finds(
    split_url: str, redis_port: int, databases: Iterator[int], seed: int
) -> None:
    """Random turns of many rollouts under few keys, with few digests of ids, some of them claimed."""
    chance = random.Random(seed)
    keys = [digest_of(str(number)) for number in range(4)]
    whole_url = f"redis://127.0.0.1:{redis_port}/{next(databases)}"
    async with opened(split_url) as split, opened(whole_url) as whole:
        for _ in range((5, 60)[seed]):
            turn = make_turn(f"r{chance.randrange(30)}", completion=b"")
            entries = [
                entry(str(number), chance.choice(["", "x", "y", "z"]))
                for number in chance.sample(range(4), chance.randrange(1, 4))
            ]
            claimed = chance.random() < 0.4
            for store in (split, whole):
                await add(store, turn, *entries)
                if claimed:
                    assert await store.claim(turn.id)
                    assert not await store.claim(turn.id)
        assert await split.find(keys) == await whole.find(keys)
        ambiguous = [
            {session.id for session in await store.sessions(limit=99) if session.ambiguous}
            for store in (split, whole)
        ]
        assert ambiguous[0] == ambiguous[1]
        assert await split.usage() == await whole.usage()
        names = [session.id for session in await whole.sessions(limit=99)]
        assert [session.id for session in await split.sessions(limit=99)] == names
        assert [session.id for session in await split.sessions(limit=7)] == names[:7]


async def test_a_search_in_a_session_asks_one_partition(split_url: str) -> None:
    async with opened(split_url) as store:
        turns = {name: make_turn(name) for name in ("a", "b", "c", "d")}
        for turn in turns.values():
            await add(store, turn, entry("k", "ids"))
        found = await store.find([digest_of("k")], "c")
        listed = [each.turn for each in found[digest_of("k")].groups[0].candidates]
        assert turns["c"].id in listed and len(listed) < 4
        assert (await store.find([digest_of("k")]))[digest_of("k")].total == 4
    async with opened(split_url) as store:  # which does not know the rollouts of these turns
        assert [await store.path(turn.id) for turn in turns.values()] == [[turn] for turn in turns.values()]
        assert await store.path("unknown") == [] and not await store.claim("unknown")
        await store.release("unknown")


async def test_two_that_add_at_once_see_each_other(split_url: str) -> None:
    async with opened(split_url) as first, opened(split_url) as second:
        for number in range(20):
            names = [f"{number}-a", f"{number}-b"]
            await asyncio.gather(
                *(
                    add(store, make_turn(name), entry(str(number), "ids"))
                    for store, name in zip((first, second), names, strict=True)
                )
            )
            found = [await first.session(name) for name in names]
            assert [each is not None and each.ambiguous for each in found] == [True, True]


async def test_the_feed_may_be_read_from_its_end(split_url: str) -> None:
    """Whoever starts at the end gets all that is finished after that, in the order of finishing."""
    async with opened(split_url) as first, opened(split_url) as second:
        for number in range(30):
            await add(first, make_turn(f"r{number}"))
        seen = await first.feed.end()
        got = []
        finishing = asyncio.gather(
            *((first, second)[n % 2].feed.finish(f"r{n}", Cause.END) for n in range(0, 30, 3))
        )
        for number in range(1, 30, 3):
            assert await first.feed.finish(f"r{number}", Cause.END)
            end = await second.feed.end()
            assert await first.feed.finish(f"r{number + 1}", Cause.END)
            assert await second.feed.end() > end
            new = await second.feed.read(end, limit=99)
            assert f"r{number + 1}" in {each.session.id for each in new}
            while found := await first.feed.read(seen, limit=2):
                got += [each.session.id for each in found]
                seen = found[-1].position
        await finishing
        got += [each.session.id for each in await first.feed.read(seen, limit=99)]
        assert sorted(got) == sorted(f"r{number}" for number in range(30))


async def test_the_master_that_a_sentinel_names(
    tmp_path: Path, redis_port: int, databases: Iterator[int]
) -> None:
    with run_sentinel(tmp_path, redis_port, quorum=1) as port:
        hosts = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}"  # the first does not exist
        turn = make_turn()
        async with opened(f"{hosts}/the-master/{next(databases)}") as store:
            await add(store, turn, entry("k", "ids"))
            assert await store.path(turn.id) == [turn]
        unknown = make_store(f"{hosts}/another/0", Limits())
        with pytest.raises(StoreError, match=r"another/0: .*No master found"):
            await unknown.open()
        await unknown.aclose()
