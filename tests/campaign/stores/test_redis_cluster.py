"""A cluster whose slots move, whose masters hand over or die, and one with TLS and users."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from proxy.history.store import Limits, Store, StoreError
from proxy.metrics import Metrics
from proxy.stores.guarded import GuardedStore
from proxy.stores.redis_partitions import SLOTS
from proxy.stores.urls import make_store
from tests.support.redis_cluster import RedisCluster, RedisNode, is_up_to_date, run_cluster, wait_for
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened

_PATIENCE_S = 20.0


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster whose slots a test may move."""
    with run_cluster(tmp_path, node_timeout_ms=5000) as cluster:
        yield cluster


@pytest.fixture
async def own_store(own_cluster: RedisCluster) -> AsyncIterator[Store]:
    async with opened(own_cluster.url) as store:
        yield store


async def _move(source: RedisNode, target: RedisNode, slot: int, share: float) -> None:
    """Move a share of the keys of a slot."""
    source_id, target_id = source.id, target.id
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    keys = source.call("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
    for key in keys[: int(share * len(keys))]:
        source.call("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)


def _owner(cluster: RedisCluster, slot: int) -> tuple[RedisNode, RedisNode]:
    """The master that has a slot, and another one."""
    first = next(i for i in range(3) if slot < (i + 1) * SLOTS // 3)
    return cluster.masters[first], cluster.masters[(first + 1) % 3]


async def test_a_slot_that_moves(own_store: Store, own_cluster: RedisCluster) -> None:
    """While keys of a partition are on two servers it refuses all calls; after that nothing is missing."""
    turns = [make_turn("r")]
    turns.append(make_turn("r", parent=turns[0].id))
    await own_store.add(make_session("r"), turns, [[entry("a", "x")], [entry("b", "y")]])
    [key] = [key for key in own_cluster.keys() if key.endswith(b":rollout:r")]  # noqa: SIM118
    slot = key_slot(key)
    source, target = _owner(own_cluster, slot)
    before = await own_store.find([digest_of("a"), digest_of("b")])
    for share in (0.0, 0.4, 1.0):
        await _move(source, target, slot, share)
        for call in (
            own_store.add(make_session("r"), [make_turn("r", parent=turns[1].id)], [[entry("c", "z")]]),
            own_store.find([digest_of("a")]),
            own_store.session("r"),
            own_store.evict(),
        ):
            with pytest.raises(StoreError, match="slot being moved"):
                await call
    for node in own_cluster.masters:
        node.call("CLUSTER", "SETSLOT", slot, "NODE", target.id)
    assert await own_store.find([digest_of("a"), digest_of("b")]) == before
    assert await own_store.path(turns[1].id) == turns
    assert await own_store.claim(turns[1].id)
    third = make_turn("r", parent=turns[1].id)
    await own_store.add(make_session("r"), [third], [[entry("c", "z")]])
    assert (await own_store.usage()).turns == 3
    # another client begins with what the servers know now
    async with opened(own_cluster.url) as other:
        assert await other.path(third.id) == [*turns, third]


async def _until_it_works(store: Store) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with suppress(StoreError):
                await store.usage()
                return
            await asyncio.sleep(0.1)


async def test_a_master_that_dies(tmp_path: Path) -> None:
    """Its replica takes over; turns that came meanwhile wait, and are recorded in the end."""
    with run_cluster(tmp_path, replicas=1, node_timeout_ms=600) as cluster:
        store = GuardedStore(make_store(cluster.url, Limits()), Metrics())
        await store.open()
        turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
        for turn in turns:
            await add(store, turn, entry(turn.id, "ids"))
        master, replica = cluster.masters[0], cluster.replicas[0]
        await asyncio.to_thread(wait_for, lambda: is_up_to_date(replica, master))
        cluster.masters[0].send(signal.SIGKILL)
        later = [make_turn(f"s{number}", completion=b"") for number in range(60)]
        for turn in later:
            await add(store, turn, entry(turn.id, "ids"))
        async with asyncio.timeout(_PATIENCE_S):
            while store.health().queued_turns or store.health().state != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await _until_it_works(store)
        assert store.health().lost_turns == 0
        for turn in (*turns, *later):
            assert await store.path(turn.id) == [turn]
        await store.aclose()
