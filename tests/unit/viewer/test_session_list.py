"""The viewer's list and one session: a page of the store at a time, a limited search, damaged JSON."""

import json
import math
from typing import Any

import msgspec
import pytest

from tests.support.store_utils import bare
from tests.support.trees import child, root
from tests.support.viewer.recordings import LIMITS
from tokenproxy.record.store import Session, Store, session_id
from tokenproxy.record.turn import new_id
from tokenproxy.store.sqlite import SqliteStore
from tokenproxy.viewer import session_list
from tokenproxy.viewer.session_list import MOST_SEARCHED, Search, list_sessions
from tokenproxy.viewer.tree import session_tree


@pytest.fixture
def store() -> SqliteStore:
    return SqliteStore(None, LIMITS)


async def _add(store: Store, *names: str, tenant: str = "", metadata: bytes = b"{}") -> None:
    """Sessions, each used after the one before."""
    for name in names:
        key = session_id(tenant, name)
        await store.add(Session(id=key, tenant=tenant, created=1.0, metadata=metadata))


async def _pages(
    store: Store, search: str = "", limit: int = 2, tenant: str = "", most: int = MOST_SEARCHED, **more: Any
) -> list[list[str]]:
    """The names of all pages."""
    pages, before = [], math.inf
    while True:
        found, last = await list_sessions(store, tenant, Search(search, **more), before, limit, most)
        pages.append([session.name for session in found])
        if last is None:
            return pages
        before = last.used


async def test_pages_are_in_order_of_use(store: Store) -> None:
    assert await _pages(store) == [[]]
    await _add(store, *"abcde")
    assert await _pages(store) == [["e", "d"], ["c", "b"], ["a"]]


async def test_a_search_is_limited_and_finds_an_exact_name_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_list, "_SEARCHED", 2)
    await _add(store, "run", "run-2", *"abc", "Run-1", "d")
    assert await _pages(store, "run", limit=9, most=4) == [["run", "Run-1"], ["run-2"]]


@pytest.mark.parametrize("search", ["MATH", "kind=math", "group=7", 'größe=say "hi"'])
async def test_a_search_finds_metadata(store: Store, search: str) -> None:
    metadata = {"group": 7, "kind": "Math", "Größe": 'say "hi"'}
    await _add(store, "found", metadata=json.dumps(metadata).encode())
    await _add(store, "damaged", metadata=b"broken")
    assert await _pages(store, search) == [["found"]]
    assert await _pages(store, "damaged") == [["damaged"]]


async def test_whole_pairs_filter_the_list(store: Store) -> None:
    await _add(store, "a", metadata=b'{"step": 3, "group": "x=y"}')
    await _add(store, "b", metadata=b'{"step": 31, "group": "x=y"}')
    assert await _pages(store, where=("step=3",)) == [["a"]]
    assert await _pages(store, "b", where=("group=x=y",)) == [["b"]]
    assert await _pages(store, "b", where=("step=3",)) == [[]]


async def test_a_search_in_messages_ends_where_it_read_enough(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        turn = root(new_id(), [1], [2], rollout=name, message=b'{"content": "Say FOUND"}')
        await store.add(Session(id=name, created=1.0), bare([turn]))
    assert await _pages(store, "found", messages=True, limit=9) == [["c", "b", "a"]]
    assert await _pages(store, "found", limit=9) == [[]]
    monkeypatch.setattr(session_list, "_READ_BYTES", 1)
    assert await _pages(store, "found", messages=True, limit=9) == [["c"], ["b"], ["a"]]


async def test_tenants_are_apart(store: Store) -> None:
    await _add(store, "a", tenant="one")
    await _add(store, "b", tenant="two")
    assert await _pages(store, tenant="one") == [["a"]]
    for search in ("b", "two/b"):
        assert await _pages(store, search, tenant="one") == [[]]
    assert await _pages(store, "two/b") == [[]]


@pytest.mark.parametrize("damaged", [b"broken", b'["\xff"]', b"[" * 5000 + b"]" * 5000])
@pytest.mark.parametrize("field, empty", [("messages", []), ("message", {})])
def test_other_turns_are_shown_next_to_damaged_json(field: str, empty: object, damaged: bytes) -> None:
    sound = root("a", [1, 2], [3])
    session = Session(id="s", created=1.0, used=2.0, metadata=damaged)
    tree = session_tree(session, [sound, child("b", sound, [4], [5], **{field: damaged})], {})
    read = json.loads(msgspec.json.encode(tree))
    assert read["turns"][0]["message"]["content"] == "from a"
    assert (read["turns"][1][field], read["session"]["metadata"]) == (empty, {})
