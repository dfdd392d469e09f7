"""The viewer's index of sessions: it finds what changed, works for a short while, and keeps tenants apart."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.history.store import Session, Store, session_id
from proxy.history.turn import Turn, WeightSpan
from proxy.stores.memory import MemoryStore
from proxy.viewer import session_index
from proxy.viewer.session_index import SessionIndex, SessionIndexes
from proxy.viewer.session_query import ListQuery, Rewards, Sort
from tests.support.trees import child, root
from tests.support.viewer.recordings import LIMITS

ALL = ListQuery()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(LIMITS)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request reads all that there is, on a slow machine too."""
    monkeypatch.setattr(session_index, "WORK_S", 60.0)


async def _add(store: Store, name: str, turns: Sequence[Turn], tenant: str = "", **fields: Any) -> None:
    session = Session(id=session_id(tenant, name), tenant=tenant, created=1.0, used=1.0, **fields)
    await store.add(session, list(turns), [[] for _ in turns])


def _turns(name: str, count: int = 1, **fields: Any) -> list[Turn]:
    turns = [root(f"{name}-0", [1, 2], [3, 4], rollout=name, **fields)]
    while len(turns) < count:
        turns.append(child(f"{name}-{len(turns)}", turns[-1], [5], [6], rollout=name))
    return turns


async def _names(index: SessionIndex, query: ListQuery = ALL, offset: int = 0, limit: int = 100) -> list[str]:
    page = await index.page(query, offset, limit)
    return [row["id"] for row in page["data"]]


async def test_it_grows_with_the_store(store: Store) -> None:
    index = SessionIndex(store, "")
    assert (await index.page(ALL, 0, 10))["complete"]
    await _add(store, "a", _turns("a"))
    await _add(store, "b", _turns("b", 3))
    page = await index.page(ALL, 0, 10)
    assert [row["id"] for row in page["data"]] == ["b", "a"]
    assert (page["matching"], page["sessions"], page["complete"]) == (2, 2, True)
    assert page["data"][0]["summary"]["sampled"] == 4
    await _add(store, "a", [child("a-1", _turns("a")[0], [5], [6, 7], rollout="a")])
    [first, _] = (await index.page(ALL, 0, 10))["data"]
    assert (first["id"], first["turn_count"], first["summary"]["ids"]) == ("a", 2, 7)


async def test_a_reward_is_found_though_it_is_no_use(store: Store) -> None:
    index = SessionIndex(store, "")
    await _add(store, "a", _turns("a"))
    await _add(store, "b", _turns("b"))
    assert (await index.page(ALL, 0, 10))["data"][1]["reward"] is None
    await store.set_rewards("a", {"": 0.5})
    page = await index.page(ALL, 0, 10)
    assert [(row["id"], row["reward"]) for row in page["data"]] == [("b", None), ("a", 0.5)]
    assert page["rewards"] == Rewards(1, 0.5, [0.5])


async def test_what_was_deleted_leaves_with_a_full_walk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = SessionIndex(store, "")
    for name in "abc":
        await _add(store, name, _turns(name))
    assert await _names(index) == ["c", "b", "a"]
    await store.delete("b")
    await store.set_rewards("a", {"": 0.5})
    assert (await index.page(ALL, 0, 9))["rewards"].values == [0.5]
    await store.delete("a")
    await store.add(Session(id="a", created=2.0, used=2.0), _turns("a"), [[]])  # it is another session
    monkeypatch.setattr(session_index, "FULL_WALK_S", 0.0)
    page = await index.page(ALL, 0, 9)
    assert [(row["id"], row["reward"]) for row in page["data"]] == [("a", None), ("c", None)]


async def test_each_request_works_for_a_while_and_the_next_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_index, "_PAGE", 10)
    monkeypatch.setattr(session_index, "WORK_S", 0.0)
    for number in range(100):
        await _add(store, f"s-{number:02}", _turns(f"s-{number:02}"))
    index = SessionIndex(store, "")
    pages = [await index.page(ALL, 0, 10)]
    while not pages[-1]["complete"]:
        assert len(pages) < 100
        pages.append(await index.page(ALL, 0, 10))
    assert pages[0]["sessions"] == 10
    assert [page["read"] for page in pages] == sorted(page["read"] for page in pages)
    assert (pages[-1]["sessions"], pages[-1]["read"]) == (100, 100)


async def test_filters(store: Store) -> None:
    weights = (WeightSpan("v7", 0, 2),)
    await _add(store, "plain", _turns("plain", model="small"), metadata=b'{"group": 7, "kind": "Math"}')
    odd = _turns("odd", reason="no_match", problem="media", weight_versions=weights)
    await _add(store, "odd", odd, metadata=b'{"a=b": "c"}')
    escaped = b'{"Gr\\u00f6\\u00dfe": "say \\"hi\\""}'
    await _add(store, "agent", _turns("agent", request_class="subagent"), metadata=escaped)
    await store.set_rewards("plain", {"": 0.25})
    index = SessionIndex(store, "")
    for query, expected in [
        (ListQuery(search="PLA"), ["plain"]),
        (ListQuery(search="math"), ["plain"]),
        (ListQuery(model="small"), ["plain"]),
        (ListQuery(metadata=("group=7",)), ["plain"]),
        (ListQuery(metadata=("a=b=c",)), ["odd"]),
        (ListQuery(search='größe=say "hi"'), ["agent"]),
        (ListQuery(reason="no_match"), ["odd"]),
        (ListQuery(problem="media"), ["odd"]),
        (ListQuery(weight_version="v7"), ["odd"]),
        (ListQuery(request_class="subagent"), ["agent"]),
        (ListQuery(request_class="unknown"), ["odd", "plain"]),
        (ListQuery(reward_min=0.25, reward_max=0.25), ["plain"]),
        (ListQuery(reward_min=0.3), []),
        (ListQuery(rewarded=False), ["agent", "odd"]),
        (ListQuery(drift=True), []),
    ]:
        assert await _names(index, query) == expected, query
    facets = (await index.page(ALL, 0, 10))["facets"]
    assert facets["classes"] == {"unknown": 2, "subagent": 1}
    assert facets["weight_versions"] == {"v7": 1}


@pytest.mark.parametrize("sort", Sort)
async def test_every_order_has_two_ways(store: Store, sort: Sort) -> None:
    for number, name in enumerate("bac"):
        await _add(store, name, _turns(name, number + 1))
        await store.set_rewards(name, {"": float(number)})
    await _add(store, "d", _turns("d"))
    index = SessionIndex(store, "")
    down = await _names(index, ListQuery(sort=sort))
    up = await _names(index, ListQuery(sort=sort, descending=False))
    if sort is Sort.REWARD:  # the session without a reward is last in both
        assert (down, up) == (["c", "a", "b", "d"], ["b", "a", "c", "d"])
    else:
        assert up == down[::-1]
    if sort is Sort.ID:
        assert up == ["a", "b", "c", "d"]


async def test_tenants_are_apart_and_an_index_that_nobody_uses_is_dropped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("one", "two"):
        await _add(store, f"of-{tenant}", _turns(f"{tenant}/of-{tenant}"), tenant)
    indexes = SessionIndexes(store)
    assert await _names(indexes.of("one")) == ["of-one"]
    assert await _names(indexes.of("two")) == ["of-two"]
    first = indexes.of("one")
    assert indexes.of("one") is first
    monkeypatch.setattr(session_index, "IDLE_S", 0.0)
    assert indexes.of("one") is first
    await asyncio.sleep(0.01)
    assert indexes.of("one") is not first
