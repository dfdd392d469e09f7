"""What a Redis store does that only a cluster, or data in partitions, can show."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from proxy.history.feed import Cause
from proxy.history.store import Limits, Store, StoreError, StoreUnusable
from proxy.metrics import Metrics
from proxy.stores.guarded import GuardedStore
from proxy.stores.redis_partitions import SLOTS, hash_tags
from proxy.stores.urls import make_store
from tests.support.redis_cluster import RedisCluster, RedisNode, is_up_to_date, run_cluster, wait_for
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, opened

_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster whose slots and masters a test may change; the first master has a replica."""
    with run_cluster(tmp_path_factory.mktemp("own"), replicas=1, node_timeout_ms=5000) as cluster:
        yield cluster


@pytest.fixture
async def own_store(own_cluster: RedisCluster) -> AsyncIterator[Store]:
    """A store in the cluster of these tests, empty."""
    own_cluster.clear()
    async with opened(own_cluster.url) as store:
        yield store


@pytest.mark.parametrize("partitions", [1, 3, 16, 100, 1024])
def test_partitions_are_spread_evenly_over_all_slots(partitions: int) -> None:
    tags = hash_tags(partitions)
    slots = [key_slot(b"tokenproxy:{%s}:used" % tag.encode()) for tag in tags]
    assert slots == [(2 * number + 1) * SLOTS // (2 * partitions) for number in range(partitions)]


async def test_a_session_is_in_one_slot(cluster_url: str, redis_cluster: RedisCluster) -> None:
    async with opened(cluster_url) as store:
        before = set(redis_cluster.keys())
        session, turns = make_session("t/r", tenant="t"), [make_turn("t/r"), make_turn("t/r")]
        await store.add(session, turns, [[entry("a", "ids"), entry("b")], [entry("b")]])
        await store.set_rewards("t/r", {"": 1.0})
        await store.pin("t/r", 2e9)
        slots = {key_slot(key) for key in set(redis_cluster.keys()) - before}
        assert len(slots) == 1
        for number in range(100):
            await add(store, make_turn(f"r{number}"), entry(str(number), "ids"))
    assert all(len(master.call("KEYS", "*turn:*")) > 15 for master in redis_cluster.masters)


async def test_the_number_of_partitions_stays(cluster_url: str, redis_url: str) -> None:
    for url in (cluster_url, redis_url):
        async with opened(f"{url}?partitions=5") as store:
            await add(store, make_turn())
        with pytest.raises(StoreUnusable, match="5 partitions, and its URL tells 6: set partitions=5"):
            await make_store(f"{url}?partitions=6", Limits()).open()
    async with opened(cluster_url) as store:
        assert (await store.usage()).turns == 1
    with pytest.raises(StoreUnusable, match=r"5 partitions: add \?partitions=5 to its URL"):
        await make_store(redis_url, Limits()).open()


async def test_data_that_are_not_split_stay_so(redis_url: str) -> None:
    async with opened(redis_url) as store:
        await add(store, make_turn())
    with pytest.raises(StoreUnusable, match="not split into partitions: leave `partitions` out"):
        await make_store(f"{redis_url}?partitions=2", Limits()).open()
    async with opened(redis_url) as store:
        assert (await store.usage()).turns == 1


async def test_a_server_of_a_cluster_is_not_the_cluster(redis_cluster: RedisCluster) -> None:
    for node in redis_cluster.masters:
        store = make_store(f"redis://127.0.0.1:{node.port}", Limits())
        with pytest.raises(StoreError, match="its URL begins with redis\\+cluster://"):
            await store.open()
        await store.aclose()


async def test_a_server_that_is_no_cluster(redis_port: int) -> None:
    store = make_store(f"redis+cluster://127.0.0.1:{redis_port}", Limits())
    with pytest.raises(StoreError, match=f"{redis_port}: .*is it a cluster"):
        await store.open()
    await store.aclose()


async def test_any_of_several_hosts_is_enough(redis_cluster: RedisCluster) -> None:
    port = redis_cluster.masters[1].port
    async with opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}") as store:
        assert (await store.usage()).turns >= 0


@pytest.mark.parametrize("seed", range(6))
async def test_partitions_find_what_one_server_finds(cluster_url: str, redis_url: str, seed: int) -> None:
    """Random turns of many rollouts under few keys, with few digests of ids, some of them claimed."""
    chance = random.Random(seed)
    keys = [digest_of(str(number)) for number in range(4)]
    async with opened(cluster_url) as split, opened(redis_url) as whole:
        for _ in range(chance.choice([5, 60, 120])):
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
        first = (await split.sessions(limit=7))[-1]
        names = [session.id for session in await whole.sessions(limit=99)]
        assert [session.id for session in await split.sessions(limit=99)] == names
        assert first.id == names[min(7, len(names)) - 1]


async def test_a_search_in_a_session_asks_one_partition(cluster_url: str) -> None:
    async with opened(cluster_url) as store:
        turns = {name: make_turn(name) for name in ("a", "b", "c", "d")}
        for turn in turns.values():
            await add(store, turn, entry("k", "ids"))
        found = await store.find([digest_of("k")], "c")
        listed = [each.turn for each in found[digest_of("k")].groups[0].candidates]
        assert turns["c"].id in listed and len(listed) < 4
        assert (await store.find([digest_of("k")]))[digest_of("k")].total == 4


async def test_turns_are_found_without_their_rollout(cluster_url: str) -> None:
    async with opened(cluster_url) as store:
        turns = [make_turn(f"r{number}") for number in range(20)]
        for turn in turns:
            await add(store, turn)
    async with opened(cluster_url) as store:
        assert [await store.path(turn.id) for turn in turns] == [[turn] for turn in turns]
        assert await store.path("unknown") == [] and not await store.claim("unknown")
        await store.release("unknown")


async def test_two_that_add_at_once_see_each_other(cluster_url: str) -> None:
    async with opened(cluster_url) as first, opened(cluster_url) as second:
        for number in range(40):
            names = [f"{number}-a", f"{number}-b"]
            await asyncio.gather(
                *(
                    add(store, make_turn(name), entry(str(number), "ids"))
                    for store, name in zip((first, second), names, strict=True)
                )
            )
            found = [await first.session(name) for name in names]
            assert [each is not None and each.ambiguous for each in found] == [True, True]


async def test_the_feed_may_be_read_from_its_end(cluster_url: str) -> None:
    """Whoever starts at the end gets all that is finished after that, in the order of finishing."""
    async with opened(cluster_url) as first, opened(cluster_url) as second:
        for number in range(60):
            await add(first, make_turn(f"r{number}"))
        seen = await first.feed.end()
        got = []
        finishing = asyncio.gather(
            *((first, second)[n % 2].feed.finish(f"r{n}", Cause.END) for n in range(0, 60, 3))
        )
        start = await second.feed.end()
        for number in range(1, 60, 3):
            assert await first.feed.finish(f"r{number}", Cause.END)
            end = await second.feed.end()
            assert await first.feed.finish(f"r{number + 1}", Cause.END)
            assert await second.feed.end() > end
            [*new] = await second.feed.read(end, limit=99)
            assert f"r{number + 1}" in {each.session.id for each in new}
            found = await first.feed.read(seen, limit=2)
            while found:
                got += [each.session.id for each in found]
                seen = found[-1].position
                found = await first.feed.read(seen, limit=2)
        await finishing
        assert start >= 0
        got += [each.session.id for each in await first.feed.read(seen, limit=99)]
        assert sorted(got) == sorted(f"r{number}" for number in range(60))


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
            own_store.path(turns[1].id),
            own_store.claim(turns[1].id),
            own_store.session("r"),
            own_store.evict(),
            own_store.delete("r"),
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
    await _move(target, source, slot, 1.0)
    for node in own_cluster.masters:
        node.call("CLUSTER", "SETSLOT", slot, "NODE", source.id)
    assert await own_store.path(third.id) == [*turns, third]


async def _until_it_works(store: Store) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with suppress(StoreError):
                await store.usage()
                return
            await asyncio.sleep(0.1)


async def _add_until(store: Store, stop: asyncio.Event, name: str, added: list[str]) -> None:
    """Add turns in many rollouts; `added` gets those that were confirmed."""
    number = 0
    while not stop.is_set():
        turn = make_turn(f"{name}{number % 40}", completion=b"")
        with suppress(StoreError):
            await add(store, turn, entry(turn.id, "ids"))
            added.append(turn.id)
        number += 1
        await asyncio.sleep(0.002)


def _takes_over(replica: RedisNode) -> bool:
    """Whether a replica is a master now; else it is asked again, for a failover may be given up."""
    if replica.call("ROLE")[0] == b"master":
        return True
    with suppress(redis.ResponseError):  # its link is not up yet, or a failover runs
        replica.call("CLUSTER", "FAILOVER")
    return False


async def test_a_master_hands_over_to_its_replica(own_store: Store, own_cluster: RedisCluster) -> None:
    stop = asyncio.Event()
    added: list[list[str]] = [[], []]
    adding = [
        asyncio.create_task(_add_until(own_store, stop, name, to))
        for name, to in zip("ab", added, strict=True)
    ]
    await asyncio.sleep(0.3)
    master, replica = own_cluster.masters[0], own_cluster.replicas[0]
    for demoted, promoted in ((master, replica), (replica, master)):
        await asyncio.to_thread(wait_for, lambda: _takes_over(promoted))  # noqa: B023
        await asyncio.to_thread(wait_for, lambda: demoted.call("ROLE")[0] == b"slave")  # noqa: B023
    async with asyncio.timeout(_PATIENCE_S):
        while sum(map(len, added)) < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*adding)
    turns = [turn for each in added for turn in each]
    await _until_it_works(own_store)
    for turn in turns:
        assert [each.id for each in await own_store.path(turn)] == [turn]


async def test_a_master_that_dies(tmp_path: Path) -> None:
    """Its replica takes over; turns that came meanwhile wait, and are recorded in the end."""
    with run_cluster(tmp_path, replicas=1, node_timeout_ms=600) as cluster:
        metrics = Metrics()
        store = GuardedStore(make_store(cluster.url, Limits()), metrics)
        await store.open()
        turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
        for turn in turns:
            await add(store, turn, entry(turn.id, "ids"))
        master, replica = cluster.masters[0], cluster.replicas[0]
        await asyncio.to_thread(wait_for, lambda: is_up_to_date(replica, master))
        cluster.masters[0].send(signal.SIGKILL)
        later = []
        for number in range(60):
            turn = make_turn(f"s{number}", completion=b"")
            await add(store, turn, entry(turn.id, "ids"))
            later.append(turn)
        async with asyncio.timeout(_PATIENCE_S):
            while store.health().queued_turns or store.health().state != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await _until_it_works(store)
        assert store.health().lost_turns == 0
        for turn in (*turns, *later):
            assert await store.path(turn.id) == [turn]
        await store.aclose()


async def test_part_of_the_cluster_is_down(tmp_path: Path) -> None:
    """No search in all partitions finds only some; sessions of the others go on if the cluster lets them."""
    options = ("--cluster-require-full-coverage", "no")
    with run_cluster(tmp_path, *options, node_timeout_ms=5000) as cluster:
        async with opened(cluster.url) as store:
            turns = [make_turn(f"r{number}", completion=b"") for number in range(60)]
            for turn in turns:
                await add(store, turn, entry("k", "ids"))
            cluster.masters[2].kill()
            with pytest.raises(StoreError, match="cluster"):
                await store.find([digest_of("k")])
            with pytest.raises(StoreError):
                await store.feed.read(0, limit=9)
            worked = 0
            for turn in turns:
                with suppress(StoreError):
                    assert await store.path(turn.id) == [turn]
                    worked += 1
            assert 30 <= worked <= 50
            assert len(turns) - worked >= 10


async def test_delete_leaves_no_names_in_the_cluster(cluster_url: str, redis_cluster: RedisCluster) -> None:
    async with opened(cluster_url) as store:
        names = set(redis_cluster.keys())
        turn = make_turn("r")
        await add(store, turn, entry("a", "ids"))
        await store.claim(turn.id)
        await store.delete("r")
        left = {key.rpartition(b":")[2] for key in set(redis_cluster.keys()) - names}
    assert left == {b"totals"}
    with redis.Redis(port=redis_cluster.masters[0].port) as client:
        assert client.ping()
