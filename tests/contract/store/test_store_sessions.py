"""Sessions: how they come about, their order, and which become ambiguous, for every store alike."""

import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.store_utils import add, entry, make_session, make_turn
from tokenproxy.record.store import Cursor, Evicted, Session, Store, Usage

_DESCRIBED = Session(
    id="tenant/r",
    tenant="tenant",
    explicit=False,
    created=1.25,
    used=2.0625,
    defaults=b'{"n":1}',
    overrides=b'{"n":2}',
    metadata=b'{"x":"\xc3\xa4"}',
)
_DESCRIPTION_SIZE = len(_DESCRIBED.defaults + _DESCRIBED.overrides + _DESCRIBED.metadata)


async def _session(store: Store, rollout: str = "r") -> Session:
    session = await store.session(rollout)
    assert session is not None
    return session


async def _ambiguous(store: Store) -> set[str]:
    return {session.id for session in await store.sessions(limit=1000) if session.ambiguous}


async def test_adding_creates_the_session_or_uses_it(store: Store) -> None:
    assert await store.add(make_session(), [], []) == Evicted()
    assert await store.usage() == Usage(0, 0, 0)
    before = time.time()
    for turns, described in enumerate((_DESCRIBED, make_session(_DESCRIBED.id)), 1):
        given = replace(described, turns=77, size=78)
        await store.add(given, [make_turn(_DESCRIBED.id)], [[]])
        session = await _session(store, _DESCRIBED.id)
        assert before <= session.used <= time.time()
        assert session == replace(_DESCRIBED, used=session.used, turns=turns, size=session.size)
        assert session.size > _DESCRIPTION_SIZE
        assert await store.usage() == Usage(1, turns, session.size)


async def test_a_saved_session_keeps_the_counts_of_the_store(store: Store) -> None:
    assert await store.save_session(replace(_DESCRIBED, turns=77, size=78, ambiguous=True)) == Evicted()
    saved = replace(_DESCRIBED, size=_DESCRIPTION_SIZE)
    assert await store.session(_DESCRIBED.id) == saved
    await store.add(replace(_DESCRIBED, ambiguous=True), [make_turn(_DESCRIBED.id)], [[]])
    counted = await _session(store, _DESCRIBED.id)
    assert counted == replace(saved, used=counted.used, turns=1, size=counted.size, ambiguous=True)
    plain = Session(id=_DESCRIBED.id, tenant="tenant", created=3.0, used=4.0)
    await store.save_session(plain)
    size = counted.size - _DESCRIPTION_SIZE + 3 * len(b"{}")
    assert await store.session(_DESCRIBED.id) == replace(plain, ambiguous=True, turns=1, size=size)
    assert await store.usage() == Usage(1, 1, size)


async def test_pinning_uses_a_session(store: Store) -> None:
    await store.save_session(make_session(used=2.0))
    before = time.time()
    await store.pin("r", 1.0)
    assert before <= (await _session(store)).used <= time.time()
    await store.pin("missing", before + 1000)
    assert await store.session("missing") is None
    # the time of use is not turned back
    await store.save_session(make_session(used=before + 1000))
    await add(store, make_turn())
    await store.pin("r", time.time())
    assert (await _session(store)).used == before + 1000


async def _pages(store: Store, limit: int, **options: Any) -> list[list[str]]:
    """The ids of all sessions, page by page."""
    pages: list[list[str]] = []
    before = None
    while page := await store.sessions(limit=limit, before=before, **options):
        pages.append([session.id for session in page])
        assert len(pages) < 100
        before = Cursor(page[-1].used, page[-1].id)
    return pages


@pytest.mark.parametrize("limit", [1, 3])
async def test_sessions_come_in_the_order_of_their_use_then_of_their_names(store: Store, limit: int) -> None:
    used = 1234567.123456789
    names = ["B", "a", "ä", "é", "a-", "a_", "A", "aa", "", "0"]
    for name in names:
        await store.save_session(make_session(name, used=used))
    for name, later in (("older", -1), ("newer", 1), ("saved", -2), ("saved", 2), ("added", -1)):
        await store.save_session(make_session(name, used=used + later))
    await add(store, make_turn("added"))
    listed = [name for page in await _pages(store, limit) for name in page]
    assert listed == ["added", "saved", "newer", *sorted(names, reverse=True), "older"]
    assert await store.sessions(limit=0) == []


async def test_sessions_of_one_tenant(store: Store) -> None:
    for number in range(10):
        tenant = ["", "t", "u"][number % 3]
        await store.save_session(make_session(f"{tenant}/{number}", tenant=tenant, used=5.0 + number // 6))
    await add(store, make_turn("t/1"))
    assert await _pages(store, 2, tenant="t") == [["t/1", "t/7"], ["t/4"]]
    assert await _pages(store, 2, tenant="u") == [["u/8", "u/5"], ["u/2"]]
    assert await _pages(store, 9, tenant="") == [["/9", "/6", "/3", "/0"]]
    await store.delete("t/7")
    assert await _pages(store, 9, tenant="t") == [["t/1", "t/4"]]
    await store.save_session(make_session("t/4", tenant="u", used=1.0))  # its tenant changes
    assert await _pages(store, 9, tenant="t") == [["t/1"]]
    assert await _pages(store, 9, tenant="u") == [["u/8", "u/5", "u/2", "t/4"]]


async def test_a_session_stays_ambiguous(store: Store) -> None:
    for ambiguous in (True, False):
        session = make_session("b", ambiguous=ambiguous)
        await store.add(session, [make_turn("b")], [[]])
    await add(store, make_turn("a"), entry("k", "ids"))
    await store.save_session(make_session("b"))
    assert await _ambiguous(store) == {"b"}
