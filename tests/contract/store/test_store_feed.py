"""The feed of finished rollouts: what `Store` promises, for every store alike."""

import asyncio
import time

import pytest

from tests.support.store_utils import add, bare, make_session, make_turn, opened
from tokenproxy.record import feed
from tokenproxy.record.feed import MOST_CONSUMERS, Consumer
from tokenproxy.record.store import Evicted, Limits, Store
from tokenproxy.record.vocabulary import Cause


async def _add(store: Store, *rollouts: str) -> None:
    """Add a turn to each rollout; the part of its name before a slash is its tenant."""
    for rollout in rollouts:
        tenant = rollout.rpartition("/")[0]
        await store.add(make_session(rollout, tenant=tenant), bare([make_turn(rollout)]))


async def _finish(store: Store, *rollouts: str) -> None:
    for rollout in rollouts:
        assert await store.finish(rollout, Cause.END)


async def _read(store: Store, after: int = 0, tenant: str | None = None) -> list[tuple[str, int]]:
    """Rollouts and revisions after a position."""
    found = (await store.feed(after, limit=1000, tenant=tenant)).sessions
    assert [each.position for each in found] == sorted({each.position for each in found})
    return [(each.id, each.revision) for each in found]


async def test_nothing_without_turns_is_finished(store: Store) -> None:
    await _add(store, "r")
    assert await feed.acknowledged(store, "", "c") is None
    assert not await feed.forget(store, "", "c")
    await store.add(make_session("empty"))
    for name in ("empty", "missing"):
        assert not await store.finish(name, Cause.END)
    await store.finish("empty", Cause.REWARD, {"": 1.0})
    assert (await _read(store), (await store.feed(2**62, limit=0)).end) == ([], 0)


async def test_the_order_is_that_of_finishing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await _add(store, "a", "b", "c", "d")
    before = int(time.time() * 1e6)
    await _finish(store, "b", "c", "a")
    assert await _read(store) == [("b", 1), ("c", 1), ("a", 1)]
    found = (await store.feed(0, limit=2)).sessions
    assert found == [await store.session("b"), await store.session("c")]
    assert [each.cause for each in found] == [Cause.END] * 2
    assert await _read(store, found[-1].position) == [("a", 1)]
    last = (await store.feed(2**62, limit=0)).end
    assert before <= found[0].position < last
    assert (await store.feed(last, limit=9)).sessions == []
    monkeypatch.setattr(time, "time", lambda: 1000.0)  # positions grow when the clock is set back
    await _finish(store, "d")
    assert await _read(store, last) == [("d", 1)]


async def test_finishing_again_needs_a_new_turn(store: Store) -> None:
    await _add(store, "a", "b")
    await _finish(store, "a", "b")
    assert not await store.finish("a", Cause.END)
    end = (await store.feed(2**62, limit=0)).end
    await _add(store, "a")
    assert await _read(store) == [("a", 1), ("b", 1)]
    await _finish(store, "a")
    # once, at its new place
    assert await _read(store) == [("b", 1), ("a", 2)]
    assert await _read(store, end) == [("a", 2)]


async def test_the_reward_of_the_rollout_finishes_it(store: Store) -> None:
    turn = make_turn("r")
    await add(store, turn)
    await store.finish("r", Cause.REWARD, {turn.id: 0.5})
    assert await _read(store) == []
    await store.finish("r", Cause.REWARD, {"": 1.0})
    [found] = (await store.feed(0, limit=9)).sessions
    assert (found.revision, found.cause) == (1, Cause.REWARD)
    # a retry, and a reward that says the same
    for same in ({"": 1.0}, {turn.id: 0.5}):
        assert not await store.finish("r", Cause.REWARD, same)
    assert await _read(store) == [("r", 1)]
    await store.finish("r", Cause.REWARD, {"": 1.5})
    assert await _read(store, found.position) == [("r", 2)]
    await store.finish("r", Cause.REWARD, {turn.id: 0.25})
    assert await _read(store, found.position) == [("r", 3)]
    await add(store, make_turn("r"))
    await store.finish("r", Cause.REWARD, {"": 1.5})
    assert await _read(store) == [("r", 4)]


async def test_deleted_rollouts_leave_the_feed(store: Store) -> None:
    await _add(store, "a", "b")
    await _finish(store, "a", "b")
    end = (await store.feed(2**62, limit=0)).end
    await store.delete("b")
    assert await _read(store) == [("a", 1)]
    assert (await store.feed(2**62, limit=0)).end == end
    await _add(store, "b")
    assert await _read(store) == [("a", 1)]
    await _finish(store, "b")
    # it is another rollout, after all that readers have seen
    assert await _read(store, end) == [("b", 1)]


async def test_a_tenant_reads_its_own_rollouts(store: Store) -> None:
    await _add(store, "t/a", "u/a", "t/b", "a")
    await _finish(store, "t/a", "u/a", "t/b", "a")
    assert await _read(store, tenant="t") == [("t/a", 1), ("t/b", 1)]
    assert await _read(store, tenant="u") == [("u/a", 1)]
    assert await _read(store, tenant="") == [("a", 1)]
    ends = [(await store.feed(2**62, limit=0, tenant=tenant)).end for tenant in ("t", "u", "nobody")]
    own = [(await store.feed(0, limit=9, tenant=tenant)).sessions[-1].position for tenant in ("t", "u")]
    assert ends == [*own, 0]
    first = (await store.feed(0, limit=1, tenant="t")).sessions[0].position
    assert await _read(store, first, tenant="t") == [("t/b", 1)]


async def test_idle_rollouts_are_finished_in_the_order_of_their_use(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "STEP", 2)
    await _add(store, "a", "b", "c", "d", "e")
    await store.pin("a", 0.0)
    await store.add(make_session("empty"))
    await _finish(store, "d")
    await feed.finish_idle(store, time.time() - 60)
    assert await _read(store) == [("d", 1)]
    later = time.time() + 60
    for _ in range(2):
        await feed.finish_idle(store, later)
        assert await _read(store) == [("d", 1), ("b", 1), ("c", 1), ("e", 1), ("a", 1)]
    assert {each.cause for each in (await store.feed(0, limit=9)).sessions[1:]} == {Cause.IDLE}
    # it is finished again after a turn
    await _add(store, "b")
    await feed.finish_idle(store, later)
    assert (await _read(store))[-1] == ("b", 2)


async def test_a_clock_that_was_ahead_keeps_no_rollout_from_being_finished(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, now = time.time() + 8 * 86_400, [0.0]
    monkeypatch.setattr(time, "time", lambda: ahead)
    await _add(store, "a", "b")
    await feed.finish_idle(store, ahead + 1)
    monkeypatch.undo()
    await _add(store, "c")  # its time of use is after those of the others
    idle = feed.IdleTime(3600.0, lambda: now[0])
    for now[0], finished in ((0.0, ["a", "b"]), (3599.0, ["a", "b"]), (3600.0, ["a", "b", "c"])):
        await feed.finish_idle(store, idle.before((await store.sessions(limit=1))[0].used))
        assert [name for name, _ in await _read(store)] == finished
    for name in finished:
        await store.delete(name)
    await _add(store, "d")
    await feed.finish_idle(store, time.time() + 1)
    assert await _read(store) == [("d", 1)]


async def test_consumers_acknowledge(store: Store) -> None:
    await _add(store, "a", "b", "c", "t/a")
    await _finish(store, "a", "t/a", "b", "c")
    first, second, third = [each.position for each in (await store.feed(0, limit=9, tenant="")).sessions]
    assert await feed.acknowledge(store, "", "new", 0) == 0
    assert await feed.acknowledge(store, "", "old", second) == second
    assert await feed.acknowledge(store, "t", "old", 0) == 0
    here = [Consumer("", "new", 0, 3, first), Consumer("", "old", second, 1, third)]
    assert await feed.consumers(store, "") == here
    assert [(each.tenant, each.waiting) for each in await feed.consumers(store)][2:] == [("t", 1)]
    # neither back, nor beyond the end: what is finished later is not acknowledged
    assert await feed.acknowledge(store, "", "old", first) == second
    assert await feed.acknowledge(store, "", "old", 2**62) == (await store.feed(2**62, limit=0)).end
    await _add(store, "d")
    await _finish(store, "d")
    assert (await feed.consumers(store, ""))[1].waiting == 1
    known = await feed.acknowledged(store, "", "old")
    assert known is not None and known.position < (await store.feed(2**62, limit=0)).end
    assert await feed.forget(store, "", "old")
    assert [each.name for each in await feed.consumers(store)] == ["new", "old"]


async def test_evicted_rollouts_that_nobody_read_are_counted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    async with opened(url, Limits(max_age_s=1000.0)) as store:
        monkeypatch.setattr(time, "time", lambda: now - 2000.0)
        await _add(store, "read", "new", "open", "t/new")
        await _finish(store, "read", "new", "t/new")
        monkeypatch.undo()
        [read, *_] = (await store.feed(0, limit=9)).sessions
        await feed.acknowledge(store, "", "fast", (await store.feed(2**62, limit=0)).end)
        await feed.acknowledge(store, "", "slow", read.position)
        evicted = await store.evict()
        assert evicted == Evicted(4, 4, evicted.size, 1)
        assert await _read(store) == []


async def test_consumers_that_begin_at_once_are_limited(shared_url: str) -> None:
    """Each tenant has its own limit, and a consumer that is there is never refused."""
    async with opened(shared_url) as first, opened(shared_url) as second:
        stores = (first, second)

        async def begin(tenant: str) -> list[int | None]:
            names = [(stores[number % 2], f"c{number // 2}") for number in range(300)]
            return await asyncio.gather(*(feed.acknowledge(store, tenant, name, 0) for store, name in names))

        for tenant in ("", "t", "tt"):
            taken = (await begin(tenant)).count(0)
            assert MOST_CONSUMERS <= taken <= 2 * MOST_CONSUMERS  # some of both stores
            listed = await feed.consumers(second, tenant)
            assert len(listed) == MOST_CONSUMERS
            for each in listed:
                assert await feed.acknowledge(first, tenant, each.name, 0) == 0
            assert await feed.acknowledge(first, tenant, "new", 0) is None
        assert await feed.forget(first, "t", (await feed.consumers(first, "t"))[0].name)
        assert await feed.acknowledge(second, "t", "new", 0) == 0
        assert await feed.acknowledge(second, "tt", "new", 0) is None


async def test_two_processes_share_feed_and_consumers(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        names = [f"r{number}" for number in range(40)]
        await _add(first, *names)
        seen: list[str] = []

        async def read() -> None:
            """Position by position: none becomes visible before one that is smaller."""
            after = 0
            while len(seen) < len(names):
                for each in (await first.feed(after, limit=7)).sessions:
                    seen.append(each.id)
                    after = each.position

        async def finish(store: Store, mine: list[str]) -> None:
            for name in mine:
                await store.finish(name, Cause.END)

        async with asyncio.timeout(15):
            await asyncio.gather(read(), finish(first, names[::2]), finish(second, names[1::2]))
        assert sorted(seen) == sorted(names)
        found = (await first.feed(0, limit=100)).sessions
        assert (await second.feed(0, limit=100)).sessions == found
        await asyncio.gather(
            *(feed.acknowledge(each, "", "c", found[5].position) for each in (first, second))
        )
        assert (await feed.consumers(second))[0].waiting == 34
    async with opened(shared_url) as store:
        assert (await store.feed(0, limit=100)).sessions == found
        assert (await feed.acknowledged(store, "", "c") or (0,))[0] == found[5].position
