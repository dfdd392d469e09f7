"""Reading the feed as samples: steps, filters, and what changes meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.history.feed import Cause
from proxy.history.store import Limits, Session, Store
from proxy.history.turn import Turn, WeightSpan
from proxy.samples import feed
from proxy.samples.feed import FeedFilter, FeedStep, metadata_matches, read_step
from proxy.stores.memory import MemoryStore
from tests.support.store_utils import make_session
from tests.support.trees import child, root

_METADATA = b"""{"env": "x=y z", "n": 1, "text": "1", "yes": true, "a": "b=c", "d=e": "f",
    "nested": {"a": [1, {"b": 2}]}}"""
_NESTED = 'nested={"a": [1, {"b": 2.0}]}'


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """An empty store; the law of its feed is tested in `tests/contract/stores`."""
    store = MemoryStore(Limits())
    await store.open()
    yield store
    await store.aclose()


async def _step(store: Store, after: int = 0, limit: int = 100, **conditions: Any) -> FeedStep:
    return await read_step(store, after, limit, FeedFilter(**conditions), "once", asyncio.to_thread)


async def _finish(store: Store, name: str, *versions: str, **fields: Any) -> Session:
    """A rollout of one turn for each version of weights; empty for unknown weights."""
    session = make_session(name, **fields)
    turns = [replace(root(f"{name}0", [1], [2]), rollout=name)]
    for number in range(1, len(versions)):
        turns.append(replace(child(f"{name}{number}", turns[-1], [3], [4]), rollout=name))
    turns = [
        replace(turn, weight_versions=(WeightSpan(version, 0, 1),) if version else ())
        for turn, version in zip(turns, versions or ("",), strict=True)
    ]
    await store.add(session, turns, [[] for _ in turns])
    assert await store.feed.finish(name, Cause.END)
    return session


def _names(step: FeedStep) -> list[str]:
    return [rollout.entry.session.id for rollout in step.rollouts]


async def test_weights_select_samples(store: Store) -> None:
    await _finish(store, "old", "7")
    await _finish(store, "new", "8", "8")
    await _finish(store, "both", "7", "8")
    await _finish(store, "half", "", "8")
    await _finish(store, "unknown")
    for versions, names in [
        ({"7"}, ["old"]),
        ({"8"}, ["new"]),
        ({"7", "8"}, ["old", "new", "both"]),
        ({"9"}, []),
        (set(), ["old", "new", "both", "half", "unknown"]),
    ]:
        step = await _step(store, weight_versions=frozenset(versions))
        assert _names(step) == names
        assert (step.position, step.more) == (await store.feed.end(), False)


async def test_a_turn_sampled_by_two_weights_is_of_both(store: Store) -> None:
    session = make_session("r")
    spans = (WeightSpan("7", 0, 1), WeightSpan("8", 1, 2))
    await store.add(session, [replace(root("t", [1], [2, 3]), rollout="r", weight_versions=spans)], [[]])
    await store.feed.finish("r", Cause.END)
    assert _names(await _step(store, weight_versions=frozenset({"8"}))) == []
    assert _names(await _step(store, weight_versions=frozenset({"7", "8"}))) == ["r"]


async def test_only_the_samples_that_fit_are_delivered(store: Store) -> None:
    def of(turn: Turn, version: str) -> Turn:
        return replace(turn, rollout="r", weight_versions=(WeightSpan(version, 0, 1),))

    first = of(root("a", [1], [2]), "7")
    turns = [first, of(child("b", first, [3], [4]), "7"), of(child("c", first, [3], [4]), "8")]
    await store.add(make_session("r"), turns, [[], [], []])
    await store.feed.finish("r", Cause.END)
    [rollout] = (await _step(store, weight_versions=frozenset({"7"}))).rollouts
    assert [sample.leaf for sample in rollout.samples] == ["b"]


@pytest.mark.parametrize("condition", ["env=x=y z", "n=1.0", "text=1", "a=b=c", "d=e=f", "yes=true", _NESTED])
def test_metadata_are_compared_as_text_or_json(condition: str) -> None:
    assert metadata_matches(_METADATA, ["n=1", condition])
    assert not metadata_matches(_METADATA, [condition, "n=2"])  # every condition must hold


@pytest.mark.parametrize(
    "condition", ["env=", "env=x", "n=1.5", "n=true", "yes=1", "lost=1", "a=b", 'nested={"a": [1]}']
)
def test_metadata_that_do_not_match(condition: str) -> None:
    assert not metadata_matches(_METADATA, [condition])


@pytest.mark.parametrize("damaged", [b"{", b"\xff", b"[" * 10**5, b'"env"'])
def test_metadata_that_cannot_be_read_match_nothing(damaged: bytes) -> None:
    assert not metadata_matches(damaged, ["env=math"])


async def test_steps_are_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ENTRIES_AT_ONCE", 3)
    monkeypatch.setattr(feed, "MOST_SCANNED", 6)
    for number in range(8):
        await _finish(store, f"r{number}", metadata=b'{"odd":%s}' % (b"true" if number % 2 else b"false"))
    found: list[str] = []
    position, more, steps = 0, True, 0
    while more:
        step = await _step(store, position, limit=2, metadata=("odd=true",))
        found += _names(step)
        position, more, steps = step.position, step.more, steps + 1
    assert found == ["r1", "r3", "r5", "r7"]
    assert position == await store.feed.end() and steps <= 4
    step = await _step(store, metadata=("odd=never",))
    assert (step.rollouts, step.more) == ([], True)
    assert step.position == (await store.feed.read(0, limit=8))[5].position
    monkeypatch.setattr(feed, "MOST_IDS", 1)
    assert _names(await _step(store)) == ["r0"]
