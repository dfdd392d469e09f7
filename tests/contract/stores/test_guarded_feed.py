"""The feed of a guarded store: what waits for turns, what may be repeated, what is skipped."""

from collections.abc import AsyncIterator
from typing import cast

import pytest

from proxy.history.feed import Cause
from proxy.history.store import Store, StoreError, StoreSkipped, StoreStalled
from proxy.history.store_time import store_time
from proxy.metrics import Metrics
from proxy.stores import breaker, guarded_calls
from proxy.stores.guarded import GuardedStore
from tests.contract.stores.patient import Patient, well
from tests.support.store_utils import add, make_turn


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> Patient:
    monkeypatch.setattr(breaker, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(breaker, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(guarded_calls, "CLOSE_S", 0.2)
    return Patient()


@pytest.fixture
async def store(inner: Patient) -> AsyncIterator[GuardedStore]:
    store = GuardedStore(cast(Store, inner), Metrics())
    await store.open()
    yield store
    inner.held.clear()
    inner.errors.clear()
    await store.aclose()


async def test_a_rollout_with_turns_that_wait_is_not_finished(store: GuardedStore, inner: Patient) -> None:
    """A reader gets it with all its turns."""
    await add(store, make_turn("r"))
    inner.held = {"add"}
    with store_time(0.05):
        await add(store, make_turn("r"))
    for call in (store.feed.finish("r", Cause.END), store.set_rewards("r", {"": 1.0})):
        with pytest.raises(StoreStalled, match="still to be recorded"):
            await call
    assert await store.feed.read(0, limit=9) == []
    inner.held.clear()
    await well(store)
    assert await store.feed.finish("r", Cause.END)
    [found] = await store.feed.read(0, limit=9)
    assert found.session.turns == 2


async def test_finishing_that_the_store_took_too_late_may_be_repeated(
    store: GuardedStore, inner: Patient
) -> None:
    await add(store, make_turn("r"))
    inner.held = {"feed_finish"}
    with store_time(0.05), pytest.raises(StoreStalled):
        await store.feed.finish("r", Cause.END)
    inner.held.clear()
    await store.feed.finish("r", Cause.END)
    assert [found.revision for found in await store.feed.read(0, limit=9)] == [1]


async def test_calls_of_the_feed_are_skipped_while_the_store_fails(
    store: GuardedStore, inner: Patient
) -> None:
    await add(store, make_turn("r"))
    await store.feed.finish("r", Cause.END)
    await store.feed.acknowledge("", "c", 0)
    inner.errors = dict.fromkeys(("find", "feed_end"), StoreError("out of order"))
    for _ in range(3):
        with pytest.raises(StoreError, match="out of order"):
            await store.feed.end()
    for call in (
        store.feed.read(0, limit=9),
        store.feed.acknowledged("", "c"),
        store.feed.acknowledge("", "c", 9),
        store.feed.consumers(),
        store.feed.forget("", "c"),
        store.feed.finish("r", Cause.END),
        store.feed.finish_idle(2e9, 9),
    ):
        with pytest.raises(StoreSkipped):
            await call
    inner.errors.clear()
    await well(store)
    assert len(await store.feed.read(0, limit=9)) == len(await store.feed.consumers()) == 1
