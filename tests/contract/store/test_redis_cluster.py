"""What a Redis store does with its keys, in a cluster and with sentinels."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from tests.support.redis_cluster import run_cluster
from tests.support.redis_server import run_sentinel
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened, usage
from tokenproxy.record.store import Limits, StoreError, StoreUnusable
from tokenproxy.record.turn import IndexedTurn
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store.urls import make_store


def _names(client: redis.Redis) -> set[bytes]:
    return {bytes(key) for key in client.keys() if isinstance(key, bytes)}  # noqa: SIM118


async def test_a_session_is_in_one_slot_and_leaves_no_names(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    async with opened(redis_url) as store:
        before = _names(client)
        session, turns = make_session("t/r", tenant="t"), [make_turn("t/r"), make_turn("t/r")]
        await store.add(
            session,
            [IndexedTurn(turns[0], [entry("a", "ids"), entry("b")]), IndexedTurn(turns[1], [entry("b")])],
        )
        await store.finish("t/r", Cause.REWARD, {"": 1.0})
        await store.pin("t/r", 2e9)
        await store.claim(digest_of("a"), digest_of("ids"))
        own = [key for key in _names(client) if b"{s/t/r}" in key]
        assert len(own) == 3 and len({key_slot(key) for key in own}) == 1
        await store.delete("t/r")
        left = {key.rpartition(b":")[2] for key in _names(client) - before}
        assert left <= {b"totals"}
    client.close()


async def test_what_another_version_wrote_is_refused(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for name, value in (("version", "3"), ("partitions", "16")):
            client.flushdb()
            client.set(f"tokenproxy:{name}", value)
            with pytest.raises(StoreUnusable, match="export them with the program that wrote them"):
                await make_store(redis_url, Limits()).open()


async def test_turns_that_a_killed_process_left_are_removed(redis_url: str) -> None:
    async with opened(redis_url) as store:
        turn = make_turn()
        await add(store, turn, entry("k", "ids"))
        with redis.Redis.from_url(redis_url) as client:
            # as between the two steps of an eviction
            client.delete("tokenproxy:{sessions}:rollout:r")
            client.sadd("tokenproxy:{sessions}:removed", "r")
            await store.evict()
            assert not client.keys("tokenproxy:{s/r}*") and not client.scard("tokenproxy:{sessions}:removed")
        [group] = (await store.find([digest_of("k")]))[digest_of("k")].groups
        assert [each.turn for each in group.candidates] == [""]


async def test_a_cluster_of_three(tmp_path: Path, redis_port: int) -> None:
    """Sessions are spread over all masters, and any of the named hosts is enough to find them."""
    with run_cluster(tmp_path) as cluster:
        turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
        async with opened(cluster.url) as store:
            await asyncio.gather(*(add(store, turn, entry("k", "ids")) for turn in turns))
        assert all(len(master.call("KEYS", "*}:turns")) > 5 for master in cluster.masters)
        async with opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.masters[1].port}") as store:
            assert (
                (await store.find([digest_of("k")]))[digest_of("k")].total == (await usage(store)).turns == 60
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
