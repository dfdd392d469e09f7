"""A cluster whose slots move, and masters that die, in a cluster and watched by sentinels."""

import asyncio
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from tests.support.redis_cluster import RedisCluster, RedisNode, is_up_to_date, run_cluster
from tests.support.redis_server import RedisServer, run_sentinel
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened, usage
from tests.support.utils import wait_until
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import Limits, Store, StoreError
from tokenproxy.record.turn import IndexedTurn
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store

_SLOTS = 16_384


async def _move(source: RedisNode, target: RedisNode, slot: int, share: float) -> None:
    """Move a share of the keys of a slot."""
    source_id, target_id = source.id, target.id
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    keys = source.call("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
    for key in keys[: int(share * len(keys))]:
        source.call("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)


async def test_a_slot_that_moves(tmp_path: Path) -> None:
    """While the list of sessions is on two servers it refuses all calls; after that nothing is missing."""
    with run_cluster(tmp_path, node_timeout_ms=5000) as cluster:
        async with opened(cluster.url) as store:
            await _check_move(cluster, store)


async def _check_move(cluster: RedisCluster, store: Store) -> None:
    turns = [make_turn("r")]
    turns.append(make_turn("r", parent=turns[0].id))
    await store.add(
        make_session("r"),
        [IndexedTurn(turns[0], [entry("a", "x")]), IndexedTurn(turns[1], [entry("b", "y")])],
    )
    [key] = [key for key in cluster.keys() if key.endswith(b":rollout:r")]  # noqa: SIM118
    slot = key_slot(key)
    first = next(i for i in range(3) if slot < (i + 1) * _SLOTS // 3)
    source, target = cluster.masters[first], cluster.masters[(first + 1) % 3]
    before = await store.find([digest_of("a"), digest_of("b")])
    third = make_turn("r", parent=turns[1].id)
    for share in (0.0, 0.4, 1.0):
        await _move(source, target, slot, share)
        for call in (
            store.add(make_session("r"), [IndexedTurn(third, [entry("c", "z")])]),
            store.session("r"),
            store.evict(),
        ):
            with pytest.raises(StoreError, match="slot being moved"):
                await call
    for node in cluster.masters:
        node.call("CLUSTER", "SETSLOT", slot, "NODE", target.id)
    assert await store.find([digest_of("a"), digest_of("b")]) == before
    assert await store.path(turns[1].id) == turns
    # a part of it may have been done: it is added again, as by the guard
    await store.add(make_session("r"), [IndexedTurn(third, [entry("c", "z")])])
    assert (await usage(store)).turns == 3
    # another client begins with what the servers know now
    async with opened(cluster.url) as other:
        assert await other.path(third.id) == [*turns, third]


async def _check_failover(url: str, master: RedisServer, replica: RedisServer) -> None:
    """A master dies: its replica takes over; turns that came meanwhile wait, and are recorded in the end."""
    store = GuardedStore(make_store(url, Limits()), Metrics())
    await store.open()
    turns = [make_turn(f"r{number}", completion=b"") for number in range(120)]
    for turn in turns[:60]:
        await add(store, turn, entry(turn.id, "ids"))
    await asyncio.to_thread(wait_until, lambda: is_up_to_date(replica, master))
    master.send(signal.SIGKILL)
    for turn in turns[60:]:
        await add(store, turn, entry(turn.id, "ids"))
    assert store.health().state != "ok" and store.health().queued_turns
    async with asyncio.timeout(30.0):
        while store.health().queued_turns or store.health().state != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert store.health().lost_turns == 0
    for turn in turns:
        assert await store.path(turn.id) == [turn]
    await store.aclose()


async def test_a_master_of_a_cluster_dies(tmp_path: Path) -> None:
    with run_cluster(tmp_path, replicas=1, node_timeout_ms=600) as cluster:
        await _check_failover(cluster.url, cluster.masters[0], cluster.replicas[0])


def _ready(port: int) -> bool:
    """Whether a sentinel knows the replica and the other sentinels."""
    with redis.Redis(port=port) as client, suppress(redis.RedisError):
        [state] = client.sentinel_masters().values()
        return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)
    return False


async def test_a_master_that_sentinels_watch_dies(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers: list[RedisServer] = []
        for name in ("master", "replica", "s0", "s1", "s2"):
            (tmp_path / name).mkdir()
        for name in ("master", "replica"):
            of = ("--replicaof", f"127.0.0.1 {servers[0].port}") if servers else ()
            servers.append(RedisServer(tmp_path / name, ("--repl-diskless-sync-delay", "0", *of)))
            servers[-1].start()
            stack.callback(servers[-1].kill)
        sentinels = [
            stack.enter_context(run_sentinel(tmp_path / f"s{number}", servers[0].port, quorum=2))
            for number in range(3)
        ]
        await asyncio.to_thread(wait_until, lambda: all(map(_ready, sentinels)))
        hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels)
        await _check_failover(f"redis+sentinel://{hosts}/the-master/0", *servers)
