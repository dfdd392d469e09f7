"""Reading the feed as samples: steps, filters, and what changes meanwhile."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.store_utils import bare, make_session
from tests.support.trees import child, root
from tokenproxy.record.store import Limits, Store
from tokenproxy.record.turn import Turn, WeightSpan
from tokenproxy.record.vocabulary import Cause
from tokenproxy.samples import feed
from tokenproxy.samples.feed import FeedFilter, FeedStep, metadata_matches, read_step
from tokenproxy.store.sqlite import SqliteStore

_METADATA = b"""{"env": "x=y z", "n": 1, "text": "1", "yes": true, "a": "b=c", "d=e": "f",
    "nested": {"a": [1, {"b": 2}]}}"""
_NESTED = 'nested={"a": [1, {"b": 2.0}]}'


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """An empty store; the law of its feed is tested in `tests/contract/store`."""
    store = SqliteStore(None, Limits())
    await store.open()
    yield store
    await store.aclose()


async def _step(store: Store, after: int = 0, limit: int = 100, **conditions: Any) -> FeedStep:
    return await read_step(store, after, limit, FeedFilter(**conditions))


async def _finish(store: Store, name: str, *versions: str, **fields: Any) -> None:
    """A rollout of one turn for each version of weights; empty for unknown weights."""
    turns: list[Turn] = []
    for number, version in enumerate(versions or ("",)):
        own = {"rollout": name, "weight_versions": (WeightSpan(version, 0, 1),) if version else ()}
        parent = {"parent": turns[-1].id} if turns else {}
        turns.append(root(f"{name}{number}", [1], [2], prompt_tokens=1 + 2 * number, **own, **parent))
    await store.add(make_session(name, **fields), bare(turns))
    assert await store.finish(name, Cause.END)


def _names(step: FeedStep) -> list[str]:
    return [rollout.session.id for rollout in step.rollouts]


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
        assert (step.position, step.more) == ((await store.feed(2**62, limit=0)).end, False)


async def test_only_the_samples_that_fit_are_delivered(store: Store) -> None:
    def of(*versions: str) -> dict[str, Any]:
        return {"rollout": "r", "weight_versions": tuple(WeightSpan(each, 0, 1) for each in versions)}

    first = root("a", [1], [2], **of("7"))
    turns = [first, child("b", first, [3], [4], **of("7")), child("c", first, [3], [4], **of("7", "8"))]
    await store.add(make_session("r"), bare(turns))
    await store.finish("r", Cause.END)
    for versions, leaves in (({"7"}, ["b"]), ({"7", "8"}, ["b", "c"])):
        [rollout] = (await _step(store, weight_versions=frozenset(versions))).rollouts
        assert [sample.leaf for sample in rollout.samples] == leaves


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
    assert position == (await store.feed(2**62, limit=0)).end and steps <= 4
    step = await _step(store, metadata=("odd=never",))
    assert (step.rollouts, step.more) == ([], True)
    assert step.position == (await store.feed(0, limit=8)).sessions[5].position
    monkeypatch.setattr(feed, "MOST_IDS", 1)
    assert _names(await _step(store)) == ["r0"]
