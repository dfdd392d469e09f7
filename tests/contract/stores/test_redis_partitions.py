"""What a Redis store does that only data in partitions, or a cluster, can show."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from proxy.history.store import Limits, StoreError, StoreUnusable
from proxy.stores.urls import make_store
from tests.support.redis_cluster import run_cluster
from tests.support.redis_server import run_sentinel
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened


def _names(client: redis.Redis) -> set[bytes]:
    return {bytes(key) for key in client.keys() if isinstance(key, bytes)}  # noqa: SIM118


@pytest.mark.parametrize("options", ["", "?partitions=3"])
async def test_a_session_is_in_one_slot_and_leaves_no_names(redis_url: str, options: str) -> None:
    client = redis.Redis.from_url(redis_url)
    async with opened(redis_url + options) as store:
        before = _names(client)
        session, turns = make_session("t/r", tenant="t"), [make_turn("t/r"), make_turn("t/r")]
        await store.add(session, turns, [[entry("a", "ids"), entry("b")], [entry("b")]])
        await store.set_rewards("t/r", {"": 1.0})
        await store.pin("t/r", 2e9)
        await store.claim(turns[0].id)
        assert len({key_slot(key) for key in _names(client) - before}) == 1 or not options
        await store.delete("t/r")
        left = {key.rpartition(b":")[2] for key in _names(client) - before}
        assert left <= {b"totals", b"feed_state"}
    client.close()


async def test_the_number_of_partitions_stays(redis_url: str) -> None:
    for options, others in (
        ("?partitions=5", {"?partitions=6": "set partitions=5", "": r"add \?partitions=5 to its URL"}),
        ("", {"?partitions=2": "not split into partitions: leave `partitions` out"}),
    ):
        async with opened(redis_url + options) as store:
            await add(store, make_turn())
        for other, message in others.items():
            with pytest.raises(StoreUnusable, match=message):
                await make_store(redis_url + other, Limits()).open()
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()


async def test_a_cluster_of_three(tmp_path: Path, redis_port: int) -> None:
    """Sessions are spread over all masters, and any of the named hosts is enough to find them."""
    with run_cluster(tmp_path) as cluster:
        turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
        async with opened(cluster.url) as store:
            await asyncio.gather(*(add(store, turn, entry("k", "ids")) for turn in turns))
        assert all(len(master.call("KEYS", "*turn:*")) > 5 for master in cluster.masters)
        async with opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.masters[1].port}") as store:
            assert (
                (await store.find([digest_of("k")]))[digest_of("k")].total
                == (await store.usage()).turns
                == 60
            )
            assert [await store.path(turn.id) for turn in turns] == [[turn] for turn in turns]
        for wrong, message in (
            (f"redis+cluster://127.0.0.1:{redis_port}", f"{redis_port}: .*is it a cluster"),
            (f"redis://127.0.0.1:{cluster.masters[0].port}", "its URL begins with redis\\+cluster://"),
        ):
            store = make_store(wrong, Limits())
            with pytest.raises(StoreError, match=message):
                await store.open()
            await store.aclose()


async def test_a_search_in_a_session_finds_its_turns(split_url: str) -> None:
    turns = {name: make_turn(name) for name in ("a", "b", "c", "d")}
    async with opened(split_url) as store:
        for turn in turns.values():
            await add(store, turn, entry("k", "ids"))
        found = await store.find([digest_of("k")], "c")
        assert turns["c"].id in [each.turn for each in found[digest_of("k")].groups[0].candidates]
    async with opened(split_url) as store:  # which does not know the rollouts of these turns
        assert [await store.path(turn.id) for turn in turns.values()] == [[turn] for turn in turns.values()]


async def test_two_that_add_at_once_see_each_other(split_url: str) -> None:
    async with opened(split_url) as first, opened(split_url) as second:
        for number in range(20):
            names = [f"{number}-a", f"{number}-b"]
            shared = entry(str(number), "ids")
            await asyncio.gather(
                add(first, make_turn(names[0]), shared), add(second, make_turn(names[1]), shared)
            )
            found = [await first.session(name) for name in names]
            assert [each is not None and each.ambiguous for each in found] == [True, True]


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
