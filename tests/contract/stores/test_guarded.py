"""The guard of a store: what a request waits, what is skipped, what is recorded later, and what is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from proxy.history.store import (
    Evicted,
    RecordRefused,
    Store,
    StoreError,
    StoreSkipped,
    StoreStalled,
    StoreUnusable,
)
from proxy.history.store_time import store_time
from proxy.history.turn import Turn
from proxy.metrics import Metrics
from proxy.stores import breaker, guarded_calls, waiting
from proxy.stores.guarded import GuardedStore
from tests.contract.stores.patient import Patient, well
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(breaker, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(guarded_calls, "START_S", 0.1)
    monkeypatch.setattr(guarded_calls, "CLOSE_S", 0.2)


@pytest.fixture
def inner() -> Patient:
    return Patient()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def store(inner: Patient, metrics: Metrics) -> AsyncIterator[GuardedStore]:
    store = GuardedStore(cast(Store, inner), metrics)
    await store.open()
    yield store
    inner.held.clear()
    inner.errors.clear()
    await store.aclose()


def _lost(metrics: Metrics, reason: str) -> float:
    return metrics.registry.get_sample_value("tokenproxy_lost_turns_total", {"reason": reason}) or 0.0


def _chain(rollout: str, length: int) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(length):
        turns.append(make_turn(rollout, parent=turns[-1].id if turns else None))
    return turns


async def test_the_calls_of_a_request_share_its_time(store: GuardedStore, inner: Patient) -> None:
    inner.held = {"find", "pin"}
    start = time.monotonic()
    with store_time(0.2):
        for call in (store.find([digest_of("k")]), store.pin("r", 0.0), store.find([digest_of("k")])):
            with pytest.raises(StoreStalled):
                await call
        assert await add(store, make_turn()) == Evicted()
    assert 0.15 < time.monotonic() - start < 0.6
    # the first took all of it
    assert inner.calls.count("find") == 1 and "pin" not in inner.calls


async def test_each_request_has_its_own_time(store: GuardedStore, inner: Patient) -> None:
    async def ask() -> float:
        start = time.monotonic()
        with store_time(0.2), pytest.raises(StoreStalled):
            await store.find([digest_of("k")])
        return time.monotonic() - start

    inner.held = {"find"}
    seconds = await asyncio.gather(*(ask() for _ in range(80)))
    assert max(seconds) < 0.8


async def test_an_event_loop_that_was_busy_is_no_slow_store(store: GuardedStore) -> None:
    async def block() -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - as a large JSON body does

    with store_time(0.1):
        blocking = asyncio.create_task(block())
        await store.find([digest_of("k")])
        await blocking
    assert store.health().state == "ok"


async def test_calls_are_skipped_after_failures_and_tried_in_the_background(
    store: GuardedStore, inner: Patient
) -> None:
    inner.errors["find"] = StoreError("out of order")
    for _ in range(3):
        with pytest.raises(StoreError, match="out of order"):
            await store.find([digest_of("k")])
    calls = len(inner.calls)
    for _ in range(100):
        with pytest.raises(StoreSkipped, match="out of order"):
            await store.find([digest_of("k")])
    assert len(inner.calls) == calls
    health = store.health()
    assert (health.state, health.error) == ("unavailable", "out of order")
    assert health.since is not None and abs(time.time() - health.since) < 10
    await asyncio.sleep(0.3)
    # the waits grow: about 0.05 s at last, not 0.01
    assert 3 <= len(inner.calls) - calls < 20
    del inner.errors["find"]
    await well(store)
    assert await store.find([digest_of("k")]) == {}
    assert store.health().error is None


async def test_writes_that_stall_leave_reads_alone(store: GuardedStore, inner: Patient) -> None:
    await add(store, make_turn("r"), entry("k", "ids"))
    inner.held = {"pin"}
    for _ in range(3):
        with store_time(0.02), pytest.raises(StoreStalled):
            await store.pin("r", 0.0)
    with pytest.raises(StoreSkipped):
        await store.release("x")
    assert (await store.find([digest_of("k")]))[digest_of("k")].total == 1
    assert store.health().state == "stalled"


async def test_turns_are_recorded_later_parents_first(store: GuardedStore, inner: Patient) -> None:
    chains = [_chain(f"r{number}", 4) for number in range(30)]
    inner.held = {"add"}
    for position in range(4):
        for chain in chains:
            turn = chain[position]
            with store_time(0.0 if position or chain is not chains[0] else 0.05):
                assert await add(store, turn, entry(turn.id, "ids")) == Evicted()
    assert store.health().queued_turns == 120
    inner.held.clear()
    await well(store)
    for chain in chains:
        own = [name for name in inner.added if name in {turn.id for turn in chain}]
        assert list(dict.fromkeys(own)) == [turn.id for turn in chain]
        assert await store.turns(chain[0].rollout) == chain
    assert (await store.usage()).turns == 120
    assert store.health().queued_turns == 0


async def test_turns_that_wait_are_found_as_if_they_were_recorded(
    store: GuardedStore, inner: Patient
) -> None:
    chain = _chain("r", 4)
    for turn in chain[:2]:
        await add(store, turn, entry(turn.id, turn.id), entry("text", turn.id))
    inner.held = {"add"}
    for turn in chain[2:]:
        with store_time(0.05):
            await add(store, turn, entry(turn.id, turn.id), entry("text", turn.id))
    last = chain[-1]
    found = await store.find([digest_of("text"), digest_of(last.id), digest_of("nothing")])
    assert set(found) == {digest_of("text"), digest_of(last.id)}
    assert found[digest_of("text")].total == len(found[digest_of("text")].groups) == 4
    (group,) = found[digest_of(last.id)].groups
    assert [(each.turn, each.rollout) for each in group.candidates] == [(last.id, "r")]
    # the turn that one of them continues is not open, although the store does not know yet
    (group,) = (await store.find([digest_of(chain[1].id)]))[digest_of(chain[1].id)].groups
    assert not group.candidates[0].open
    assert await store.path(last.id) == chain
    assert await store.turns("r") == chain
    assert await store.newest("r", 3) == [turn.id for turn in reversed(chain[1:])]
    assert not await store.claim(last.id)
    with pytest.raises(StoreStalled, match="still to be recorded"):
        await store.delete("r")
    with pytest.raises(StoreStalled, match="still to be recorded"):
        await store.set_rewards("r", {"": 1.0})
    inner.held.clear()
    await well(store)
    assert await store.path(last.id) == chain == await store.turns("r")
    assert await store.set_rewards("r", {"": 1.0})


async def test_choices_of_one_request_that_wait(store: GuardedStore, inner: Patient) -> None:
    first = make_turn("r", appended=b"\1\0\0\0", messages=b'[{"role":"user"}]')
    inner.held = {"add"}
    other = make_turn("r", request=first.request, choice=1, prompt_turn=first.id)
    with store_time(0.02):
        await store.add(make_session("r"), [first, other], [[], []])
    (path,) = await store.path(other.id)
    assert (path.appended, path.messages) == (first.appended, first.messages)
    session = await store.session("r")
    assert session is not None and session.turns == 2


async def test_the_same_text_with_other_ids_stays_ambiguous_while_one_of_the_turns_waits(
    store: GuardedStore, inner: Patient
) -> None:
    await add(store, make_turn("a"), entry("text", "one"))
    inner.held = {"add"}
    with store_time(0.02):
        await add(store, make_turn("b"), entry("text", "other"))
    found = (await store.find([digest_of("text")]))[digest_of("text")]
    assert {group.ids for group in found.groups} == {digest_of("one"), digest_of("other")}
    # while the store cannot be read, what waits here alone decides nothing
    inner.errors["find"] = StoreError("out of order")
    with pytest.raises(StoreError):
        await store.find([digest_of("text")])


async def test_a_claim_that_comes_too_late_is_released(store: GuardedStore, inner: Patient) -> None:
    turn = make_turn()
    await add(store, turn, entry("k", "ids"))
    inner.held = {"claim"}
    with store_time(0.02), pytest.raises(StoreStalled):
        await store.claim(turn.id)
    inner.held.clear()
    async with asyncio.timeout(5):
        while "release" not in inner.calls:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
    assert await store.claim(turn.id)


async def test_too_many_turns_are_lost_and_counted(
    store: GuardedStore, inner: Patient, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_TURNS", 3)
    inner.errors["add"] = StoreError("disk full")
    turns = [make_turn(f"r{number}") for number in range(5)]
    for turn in turns[:3]:
        await add(store, turn)
    for turn in turns[3:]:
        with pytest.raises(StoreError, match="too many turns wait"):
            await add(store, turn)
    assert (store.health().queued_turns, store.health().lost_turns) == (3, 2)
    assert _lost(metrics, "queue_full") == 2
    inner.errors.clear()
    await well(store)
    assert (await store.usage()).turns == 3
    assert store.health().lost_turns == 2


async def test_too_many_bytes_are_lost(
    store: GuardedStore, inner: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_BYTES", 2500)
    inner.errors["add"] = StoreError("disk full")
    await add(store, make_turn("a"))
    await add(store, make_turn("b"))
    with pytest.raises(StoreError, match="too many turns wait"):
        await add(store, make_turn("c"))


async def test_what_waits_at_the_end_is_recorded_or_counted(inner: Patient, metrics: Metrics) -> None:
    for gone in (False, True):
        store = GuardedStore(cast(Store, inner), metrics)
        await store.open()
        inner.held = {"add"}
        with store_time(0.01):
            await add(store, make_turn(f"r{gone}"))
        closing = asyncio.create_task(store.aclose())
        await asyncio.sleep(0.05)
        if not gone:
            inner.held.clear()
        await closing
        assert store.health().lost_turns == gone
    assert _lost(metrics, "shutdown") == 1
    assert (await inner.store.usage()).turns == 1


@pytest.mark.parametrize("error", [RecordRefused("too big"), OverflowError("too big")])
async def test_a_turn_that_is_refused_keeps_no_other_waiting(
    store: GuardedStore, inner: Patient, metrics: Metrics, error: Exception
) -> None:
    bad, good = make_turn("bad"), make_turn("good")
    inner.errors["add"] = StoreError("disk full")
    await add(store, bad)
    inner.errors["add"] = error
    await well(store)
    inner.errors.clear()
    await add(store, good)
    assert await store.turns("good") == [good]
    assert _lost(metrics, "refused") == 1
    inner.errors["add"] = error
    with pytest.raises(type(error)):
        await add(store, make_turn("at once"))
    assert _lost(metrics, "refused") == 2
    assert store.health().state == "ok"


async def test_a_store_that_is_missing_at_the_start(inner: Patient, metrics: Metrics) -> None:
    inner.errors["open"] = StoreError("no server")
    store = GuardedStore(cast(Store, inner), metrics)
    await store.open()
    assert (store.health().state, store.health().error) == ("unavailable", "no server")
    with pytest.raises(StoreSkipped, match="no server"):
        await store.find([digest_of("k")])
    turn = make_turn()
    await add(store, turn)
    inner.errors.clear()
    await well(store)
    assert await store.turns("r") == [turn]
    await store.aclose()


async def test_a_store_that_hangs_at_the_start(inner: Patient, metrics: Metrics) -> None:
    inner.held = {"open"}
    store = GuardedStore(cast(Store, inner), metrics)
    start = time.monotonic()
    await store.open()
    assert time.monotonic() - start < 2.0
    assert store.health().state == "stalled"
    inner.held.clear()
    await well(store)
    assert inner.calls.count("open") == 1  # two would be two stores
    await store.aclose()


async def test_a_store_that_opens_before_it_is_tried_again(
    inner: Patient, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker.Backoff, "start", lambda backoff: 0.1)
    inner.held = {"open"}
    store = GuardedStore(cast(Store, inner), metrics)
    await store.open()
    inner.held.clear()
    await well(store)
    assert inner.calls.count("open") == 1
    await store.aclose()


async def test_a_required_store_fails_at_the_start(inner: Patient, metrics: Metrics) -> None:
    inner.errors["open"] = StoreError("no server")
    with pytest.raises(StoreError, match="no server"):
        await GuardedStore(cast(Store, inner), metrics, required=True).open()


async def test_what_will_not_heal_fails_at_the_start(inner: Patient, metrics: Metrics) -> None:
    inner.errors["open"] = StoreUnusable("another version")
    with pytest.raises(StoreUnusable, match="another version"):
        await GuardedStore(cast(Store, inner), metrics).open()


async def test_background_work_has_a_limit_of_its_own(
    store: GuardedStore, inner: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.history.store_time.BACKGROUND_S", 0.1)
    inner.held = {"evict"}
    with pytest.raises(StoreStalled, match=r"0\.1 s"):
        await store.evict()
