"""The guard of a store: what a request waits, what is skipped, what is recorded later, and what is lost."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from tests.support.store_utils import add, digest_of, entry, make_session, make_turn, usage
from tests.support.utils import until
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.store import (
    DOCUMENTS,
    Evicted,
    Limits,
    RecordRefused,
    Store,
    StoreError,
    StoreSkipped,
    StoreStalled,
    StoreUnusable,
)
from tokenproxy.record.store_time import StoreTime
from tokenproxy.record.turn import Turn
from tokenproxy.record.vocabulary import Cause
from tokenproxy.store.guarded import _READS, GuardedStore, GuardLimits
from tokenproxy.store.sqlite import SqliteStore

_STALLED_S = 0.01
"""What a request waits for a call that is held up."""
_BROKEN = StoreError("out of order")


class Patient:
    """A store in memory whose calls can be held up, or fail."""

    def __init__(self) -> None:
        self.store = SqliteStore(None, Limits())
        self.limits, self.unreadable = self.store.limits, self.store.unreadable
        self.metrics = Metrics()
        self.held: set[str] = set()
        self.errors: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.added: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            while name in self.held:  # noqa: ASYNC110 - a test lets it go
                await asyncio.sleep(0.002)
            if name in self.errors:
                raise self.errors[name]
            if name == "add":
                self.added += [turn.id for turn, _ in args[1]]
            return await getattr(self.store, name)(*args, **kwargs)

        return call


@pytest.fixture
def inner() -> Patient:
    return Patient()


@pytest.fixture
async def make(inner: Patient) -> AsyncIterator[Callable[..., GuardedStore]]:
    """Makes a guarded store, not yet open."""
    stores = []

    def make(required: bool = False, **limits: Any) -> GuardedStore:
        usual = {"start_s": 20.0, "close_s": 0.02, "first_wait_s": 0.001, "longest_wait_s": 0.005}
        guard = GuardLimits(**{**usual, **limits})
        stores.append(GuardedStore(cast(Store, inner), inner.metrics, required=required, limits=guard))
        return stores[-1]

    yield make
    inner.held.clear()
    inner.errors.clear()
    for store in stores:
        await store.aclose()


@pytest.fixture
async def store(make: Callable[..., GuardedStore]) -> GuardedStore:
    store = make()
    await store.open()
    return store


async def _well(store: GuardedStore) -> None:
    """Wait until the store works again."""
    await until(lambda: store.health().state == "ok")


def _chain(rollout: str, length: int) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(length):
        turns.append(make_turn(rollout, parent=turns[-1].id if turns else None))
    return turns


async def test_the_calls_of_a_request_share_its_time(store: GuardedStore, inner: Patient) -> None:
    inner.held = {"find", "pin"}
    with StoreTime(_STALLED_S):
        for call in (store.find([digest_of("k")]), store.pin("r", 0.0), store.find([digest_of("k")])):
            with pytest.raises(StoreStalled):
                await call
        assert await add(store, make_turn()) == Evicted()
    # the first took all of it
    assert inner.calls.count("find") == 1 and "pin" not in inner.calls


async def test_calls_are_skipped_after_failures_and_tried_in_the_background(
    store: GuardedStore, inner: Patient
) -> None:
    await add(store, make_turn())
    inner.errors = dict.fromkeys(("find", "get", "feed"), _BROKEN)
    for call in (store.find([digest_of("k")]), store.get("x", ["a"]), store.feed(0, limit=0)):
        with pytest.raises(StoreError, match="out of order"):
            await call
    calls = [call for call in inner.calls if call != "find"]
    for skipped in (
        store.find([digest_of("k")]),
        store.release("x"),  # what cannot be read is not written either
        store.put("x", "a", b"{}"),
        store.feed(0, limit=0),
        store.finish("r", Cause.END),
    ):
        with pytest.raises(StoreSkipped, match="out of order"):
            await skipped
    assert [call for call in inner.calls if call != "find"] == calls
    health = store.health()
    assert (health.state, health.error) == ("unavailable", "out of order")
    assert health.since is not None
    inner.errors.clear()
    await _well(store)
    assert await store.find([digest_of("k")]) == {} and store.health().error is None


def test_every_call_of_the_store_is_stated_as_a_read_or_a_write() -> None:
    calls = {name for name, value in vars(Store).items() if inspect.iscoroutinefunction(value)}
    writes = {"add", "claim", "release", "pin", "delete", "finish", "put", "evict"}
    assert calls == _READS | writes | {"open", "aclose"}


async def test_writes_that_stall_leave_reads_alone(store: GuardedStore, inner: Patient) -> None:
    await add(store, make_turn("r"), entry("k", "ids"))
    inner.held = {"pin"}
    for _ in range(3):
        with StoreTime(_STALLED_S), pytest.raises(StoreStalled):
            await store.pin("r", 0.0)
    with pytest.raises(StoreSkipped):
        await store.release("x")
    assert (await store.find([digest_of("k")]))[digest_of("k")].total == 1
    assert store.health().state == "stalled"
    inner.held.clear()
    await _well(store)
    await store.pin("r", 0.0)


async def test_turns_are_recorded_later_parents_first(store: GuardedStore, inner: Patient) -> None:
    """More rollouts than are tried at once."""
    chains = [_chain(f"r{number}", 3) for number in range(70)]
    inner.held = {"add"}
    for position in range(3):
        for chain in chains:
            turn = chain[position]
            with StoreTime(0.0 if position or chain is not chains[0] else _STALLED_S):
                assert await add(store, turn, entry(turn.id, "ids")) == Evicted()
    assert store.health().queued_turns == 210
    inner.held.clear()
    await _well(store)
    for chain in chains:
        own = [name for name in inner.added if name in {turn.id for turn in chain}]
        assert list(dict.fromkeys(own)) == [turn.id for turn in chain]
        assert await store.turns(chain[0].rollout) == chain


async def test_a_turn_waits_for_those_before_it(store: GuardedStore, inner: Patient) -> None:
    """Also if the store works again: a child is not recorded before its parent."""
    parent, child = _chain("r", 2)
    inner.errors["add"] = _BROKEN
    await add(store, parent)
    inner.errors.clear()
    await add(store, child)
    await _well(store)
    assert inner.added == [parent.id, child.id]


async def test_turns_that_wait_are_found_as_if_they_were_recorded(
    store: GuardedStore, inner: Patient
) -> None:
    chain = _chain("r", 4)
    for turn in chain[:2]:
        await add(store, turn, entry(turn.id, turn.id), entry("text", turn.id))
    inner.held = {"add"}
    for turn in chain[2:]:
        with StoreTime(_STALLED_S):
            await add(store, turn, entry(turn.id, turn.id), entry("text", turn.id))
    last = chain[-1]
    found = await store.find([digest_of("text"), digest_of(last.id), digest_of("nothing")])
    assert set(found) == {digest_of("text"), digest_of(last.id)}
    assert found[digest_of("text")].total == len(found[digest_of("text")].groups) == 4
    (group,) = found[digest_of(last.id)].groups
    assert [each.turn for each in group.candidates] == [last.id]
    # neither it can be claimed nor the turn that one of them continues, although the store does not know yet
    for turn in (chain[1], last):
        assert await store.claim(digest_of(turn.id), digest_of(turn.id)) is None
    assert await store.path(last.id) == await store.turns("r") == chain
    assert await store.newest("r", 3) == [turn.id for turn in reversed(chain[1:])]
    # what is not complete is neither changed nor shown to the feed's readers
    for call in (
        store.delete("r"),
        store.finish("r", Cause.REWARD, {"": 1.0}),
        store.add(make_session("r")),
        store.finish("r", Cause.END),
    ):
        with pytest.raises(StoreStalled, match="still to be recorded"):
            await call
    assert (await store.feed(0, limit=9)).sessions == []
    # while the store cannot be read, what waits here alone decides nothing
    inner.errors["find"] = _BROKEN
    with pytest.raises(StoreError):
        await store.find([digest_of("text")])
    inner.errors.clear()
    inner.held.clear()
    await _well(store)
    assert await store.path(last.id) == chain == await store.turns("r")
    assert await store.finish("r", Cause.REWARD, {"": 1.0})
    [finished] = (await store.feed(0, limit=9)).sessions
    assert finished.turns == 4


async def test_a_document_is_stored_later_and_read_meanwhile(store: GuardedStore, inner: Patient) -> None:
    inner.errors = {"put": StoreError("disk full"), "get": StoreError("disk full")}
    for name in ("kept", "deleted"):
        assert not await store.put(DOCUMENTS, name, b"{}", keep_s=60.0, before=None)
    assert await store.put(DOCUMENTS, "deleted", None)
    assert await store.get(DOCUMENTS, ["kept"]) == {"kept": b"{}"}
    with pytest.raises(StoreError):
        await store.put("other", "kept", b"{}")
    inner.errors.clear()
    await _well(store)
    assert (
        await inner.store.get(DOCUMENTS) == await store.get(DOCUMENTS, ["kept", "deleted"]) == {"kept": b"{}"}
    )


async def test_a_document_that_is_refused_keeps_nothing_waiting(store: GuardedStore, inner: Patient) -> None:
    inner.errors["put"] = StoreError("disk full")
    assert not await store.put(DOCUMENTS, "big", b"{}")
    inner.errors["put"] = RecordRefused("too big")
    await _well(store)
    assert await store.get(DOCUMENTS, ["big"]) == {}
    with pytest.raises(RecordRefused):
        await store.put(DOCUMENTS, "big", b"{}")


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_claim_that_comes_too_late_is_released(
    store: GuardedStore, inner: Patient, leaves: bool
) -> None:
    turn, group = make_turn(), (digest_of("k"), digest_of("ids"))
    await add(store, turn, entry("k", "ids"))
    inner.held = {"claim"}
    with StoreTime(15.0 if leaves else _STALLED_S):
        claiming = asyncio.create_task(store.claim(*group))
    await until(lambda: "claim" in inner.calls)
    if leaves:
        claiming.cancel()
    with pytest.raises(asyncio.CancelledError if leaves else StoreStalled):
        await claiming
    inner.held.clear()
    await until(lambda: "release" in inner.calls)
    assert await store.claim(*group) == turn.id


@pytest.mark.parametrize("limits", [{"most_turns": 3}, {"most_bytes": 4000}])
async def test_too_many_turns_are_lost_and_counted(
    make: Callable[..., GuardedStore], inner: Patient, limits: dict[str, int]
) -> None:
    store = make(**limits)
    await store.open()
    inner.errors["add"] = StoreError("disk full")
    for name in ("a", "b", "c"):
        await add(store, make_turn(name))
    for name in ("d", "e"):
        with pytest.raises(StoreError, match=r"too many turns wait .*disk full"):
            await add(store, make_turn(name))
    assert (store.health().queued_turns, store.health().lost_turns) == (3, 2)
    lost = inner.metrics.registry.get_sample_value("tokenproxy_lost_turns_total", {"reason": "queue_full"})
    assert lost == 2


@pytest.mark.parametrize("gone", [False, True])
async def test_what_waits_at_the_end_is_recorded_or_counted(
    make: Callable[..., GuardedStore], inner: Patient, gone: bool
) -> None:
    store = make(close_s=0.02 if gone else 15.0)
    await store.open()
    inner.held = {"add"}
    with StoreTime(_STALLED_S):
        await add(store, make_turn())
    closing = asyncio.create_task(store.aclose())
    await asyncio.sleep(0)
    if not gone:
        inner.held.clear()
    await closing
    assert store.health().lost_turns == gone
    assert (await usage(inner.store)).turns == (not gone)


async def test_a_turn_that_is_refused_keeps_no_other_waiting(store: GuardedStore, inner: Patient) -> None:
    error = RecordRefused("too big")
    bad, good = make_turn("bad"), make_turn("good")
    inner.errors["add"] = StoreError("disk full")
    await add(store, bad)
    inner.errors["add"] = error
    await _well(store)
    inner.errors.clear()
    await add(store, good)
    assert await store.turns("good") == [good]
    inner.errors["add"] = error
    with pytest.raises(RecordRefused):
        await add(store, make_turn("at once"))
    assert (store.health().lost_turns, store.health().state) == (2, "ok")


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_store_that_is_missing_or_hangs_at_the_start(
    make: Callable[..., GuardedStore], inner: Patient, hangs: bool
) -> None:
    inner.held, inner.errors = (
        {"open"} if hangs else set(),
        {} if hangs else {"open": StoreError("no server")},
    )
    store = make(start_s=0.01)
    await store.open()
    assert store.health().state == ("stalled" if hangs else "unavailable")
    turn = make_turn()
    await add(store, turn)
    inner.held.clear()
    inner.errors.clear()
    await _well(store)
    assert await store.turns("r") == [turn]
    assert inner.calls.count("open") == 1 or not hangs  # two would be two stores


@pytest.mark.parametrize(
    "error, required", [(StoreError("no server"), True), (StoreUnusable("another version"), False)]
)
async def test_a_required_store_and_one_that_will_not_heal_fail_at_the_start(
    make: Callable[..., GuardedStore], inner: Patient, error: StoreError, required: bool
) -> None:
    inner.errors["open"] = error
    with pytest.raises(type(error), match=str(error)):
        await make(required=required).open()
