"""Sessions: how they come about, their order, and which become ambiguous, for every store alike."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.history.store import Cursor, Evicted, IndexEntry, Session, Store, Usage
from tests.support.store_utils import add, entry, make_session, make_turn

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


async def test_adding_nothing_creates_no_session(store: Store) -> None:
    assert await store.add(make_session(), [], []) == Evicted()
    assert await store.usage() == Usage(0, 0, 0)


async def test_adding_creates_the_session(store: Store) -> None:
    before = time.time()
    turn = make_turn(_DESCRIBED.id)
    await store.add(replace(_DESCRIBED, turns=77, size=78, ambiguous=True), [turn], [[]])
    session = await _session(store, _DESCRIBED.id)
    assert before <= session.used <= time.time()
    assert session == replace(_DESCRIBED, used=session.used, turns=1, size=session.size)
    assert session.size > _DESCRIPTION_SIZE
    assert await store.usage() == Usage(1, 1, session.size)


async def test_adding_only_uses_a_session_that_exists(store: Store) -> None:
    await store.save_session(_DESCRIBED)
    before = time.time()
    other = Session(id=_DESCRIBED.id, created=3.0, used=4.0, metadata=b'{"other":1}')
    await store.add(other, [make_turn(_DESCRIBED.id)], [[]])
    session = await _session(store, _DESCRIBED.id)
    assert session == replace(_DESCRIBED, used=session.used, turns=1, size=session.size)
    assert before <= session.used <= time.time()


async def test_adding_does_not_turn_back_the_time_of_use(store: Store) -> None:
    later = time.time() + 1000
    await store.save_session(make_session(used=later))
    await add(store, make_turn())
    await store.pin("r", time.time())
    assert (await _session(store)).used == later


@pytest.mark.parametrize("rollout", [f"{7:028x}0000", f"{7:032x}", "a/b", "ä"])
@pytest.mark.parametrize("explicit", [False, True])
async def test_the_id_of_a_session_has_no_meaning(store: Store, rollout: str, explicit: bool) -> None:
    await store.add(make_session(rollout, explicit=explicit), [make_turn(rollout)], [[]])
    session = await _session(store, rollout)
    assert (session.explicit, session.tenant) == (explicit, "")


async def test_a_saved_session_keeps_the_counts_of_the_store(store: Store) -> None:
    assert await store.save_session(replace(_DESCRIBED, turns=77, size=78, ambiguous=True)) == Evicted()
    saved = replace(_DESCRIBED, size=_DESCRIPTION_SIZE)
    assert await store.session(_DESCRIBED.id) == saved
    await store.add(_DESCRIBED, [make_turn(_DESCRIBED.id, reason="ambiguous")], [[]])
    counted = await _session(store, _DESCRIBED.id)
    assert counted == replace(saved, used=counted.used, turns=1, size=counted.size, ambiguous=True)
    assert counted.size > _DESCRIPTION_SIZE + 1000
    plain = Session(id=_DESCRIBED.id, tenant="tenant", created=3.0, used=4.0)
    await store.save_session(plain)
    size = counted.size - _DESCRIPTION_SIZE + 3 * len(b"{}")
    assert await store.session(_DESCRIBED.id) == replace(plain, ambiguous=True, turns=1, size=size)
    assert await store.usage() == Usage(1, 1, size)
    await store.save_session(_DESCRIBED)
    assert await store.usage() == Usage(1, 1, counted.size)
    assert await store.delete(_DESCRIBED.id)
    assert await store.usage() == Usage(0, 0, 0)


async def test_a_deleted_description_does_not_come_back(store: Store) -> None:
    await store.save_session(_DESCRIBED)
    await store.delete(_DESCRIBED.id)
    await store.save_session(make_session(_DESCRIBED.id))
    assert (await _session(store, _DESCRIBED.id)).metadata == b"{}"


async def test_pinning_uses_a_session(store: Store) -> None:
    await store.save_session(make_session(used=2.0))
    before = time.time()
    await store.pin("r", 1.0)
    assert before <= (await _session(store)).used <= time.time()
    assert await store.sessions(limit=1) == [await _session(store)]
    await store.pin("missing", before + 1000)
    assert await store.session("missing") is None


async def _pages(store: Store, limit: int, **options: Any) -> list[list[str]]:
    """The ids of all sessions, page by page."""
    pages: list[list[str]] = []
    before = None
    while page := await store.sessions(limit=limit, before=before, **options):
        pages.append([session.id for session in page])
        assert len(pages) < 100
        before = Cursor(page[-1].used, page[-1].id)
    return pages


async def test_sessions_in_the_order_of_their_use(store: Store) -> None:
    for used in (3.0, 1.5, 5.0, 2.0, 4.0):
        await store.save_session(make_session(f"s{used}", used=used))
    assert await _pages(store, 2) == [["s5.0", "s4.0"], ["s3.0", "s2.0"], ["s1.5"]]
    assert await store.sessions(limit=0) == []
    await store.save_session(make_session("s1.5", used=4.5))
    await add(store, make_turn("s2.0"))
    assert await _pages(store, 5) == [["s2.0", "s5.0", "s1.5", "s4.0", "s3.0"]]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
async def test_no_session_is_skipped_or_repeated_at_equal_use(store: Store, limit: int) -> None:
    used = 1234567.123456789
    names = ["B", "a", "ä", "é", "a-", "a_", "A", "aa", "", "0"]
    for name in names:
        await store.save_session(make_session(name, used=used))
    await store.save_session(make_session("newer", used=used + 1))
    await store.save_session(make_session("older", used=used - 1))
    pages = await _pages(store, limit)
    assert [name for page in pages for name in page] == ["newer", *sorted(names, reverse=True), "older"]


async def test_a_cursor_need_not_be_a_session(store: Store) -> None:
    for name in ("a", "c", "e"):
        await store.save_session(make_session(name, used=5.0))
    await store.save_session(make_session("old", used=4.0))

    async def after(used: float, name: str) -> list[str]:
        return [session.id for session in await store.sessions(limit=9, before=Cursor(used, name))]

    assert await after(5.0, "d") == ["c", "a", "old"]
    assert await after(5.0, "c") == ["a", "old"]
    assert await after(5.0, "") == ["old"]
    assert await after(4.5, "z") == ["old"]
    assert await after(6.0, "a") == ["e", "c", "a", "old"]
    await store.save_session(make_session("c", used=9.0))
    assert await after(5.0, "c") == ["a", "old"]


async def test_sessions_of_one_tenant(store: Store) -> None:
    for number in range(10):
        tenant = ["", "t", "u"][number % 3]
        await store.save_session(make_session(f"{tenant}/{number}", tenant=tenant, used=5.0 + number // 6))
    await add(store, make_turn("t/1"))
    assert await _pages(store, 2, tenant="t") == [["t/1", "t/7"], ["t/4"]]
    assert await _pages(store, 2, tenant="u") == [["u/8", "u/5"], ["u/2"]]
    assert await _pages(store, 9, tenant="") == [["/9", "/6", "/3", "/0"]]
    assert await _pages(store, 9, tenant="v") == []
    await store.delete("t/7")
    assert await _pages(store, 9, tenant="t") == [["t/1", "t/4"]]
    assert sum(map(len, await _pages(store, 4))) == 9


async def test_a_session_may_change_its_tenant(store: Store) -> None:
    await store.save_session(make_session(tenant="t"))
    await store.save_session(make_session(tenant="u"))
    assert await _pages(store, 9, tenant="t") == []
    assert await _pages(store, 9, tenant="u") == [["r"]]
    assert await store.delete("r")
    assert await _pages(store, 9, tenant="u") == []


def test_names_of_sessions() -> None:
    assert Session(id="t/n", tenant="t", created=0.0, used=0.0).name == "n"
    assert Session(id="n", created=0.0, used=0.0).name == "n"


async def test_equal_conversations_are_ambiguous(store: Store) -> None:
    await add(store, make_turn("a"), entry("k", "ids"))
    await add(store, make_turn("other"), entry("other", "ids"))
    assert await _ambiguous(store) == set()
    await add(store, make_turn("b"), entry("x", "ids"), entry("k", "other ids"))
    assert await _ambiguous(store) == {"a", "b"}
    await add(store, make_turn("c"), entry("k", "ids"))
    assert await _ambiguous(store) == {"a", "b", "c"}


async def test_a_rollout_is_not_ambiguous_with_itself(store: Store) -> None:
    turns = [make_turn(), make_turn()]
    await store.add(make_session(), turns, [[entry("k", "ids")]] * 2)
    await add(store, make_turn(), entry("k", "ids"))
    assert await _ambiguous(store) == set()


async def test_keys_that_only_explain_make_nothing_ambiguous(store: Store) -> None:
    for rollout in ("a", "b"):
        await add(store, make_turn(rollout), entry("k"))
    await add(store, make_turn("c"), entry("other", "ids"))
    await add(store, make_turn("d"), entry("other"))
    assert await _ambiguous(store) == set()


@pytest.mark.parametrize(
    "order",
    [
        (("a", "ids"), ("a", "ids"), ("b", "ids"), ("a", "ids")),
        (("a", ""), ("b", ""), ("c", "ids")),
        (("a", "ids"), ("b", ""), ("c", ""), ("a", "ids")),
        (("a", "ids"), ("b", "x"), ("c", ""), ("d", "y")),
        (("a", ""), ("a", "ids"), ("b", "ids")),
        tuple((f"r{number}", f"ids{number % 3}") for number in range(20)),
    ],
)
async def test_all_rollouts_under_one_key_become_ambiguous(
    store: Store, order: Sequence[tuple[str, str]]
) -> None:
    for rollout, ids in order:
        await add(store, make_turn(rollout), entry("k", ids))
    assert await _ambiguous(store) == {rollout for rollout, _ in order}


async def test_an_ambiguous_turn_makes_its_session_ambiguous(store: Store) -> None:
    await add(store, make_turn("a", reason="ambiguous"))
    await add(store, make_turn("b", reason="no_match"))
    assert await _ambiguous(store) == {"a"}


async def test_a_session_stays_ambiguous(store: Store) -> None:
    shared: IndexEntry = entry("k", "ids")
    await add(store, make_turn("a"), shared)
    await add(store, make_turn("b"), shared)
    await store.delete("a")
    await store.save_session(make_session("b"))
    await add(store, make_turn("b"))
    assert await _ambiguous(store) == {"b"}
    await add(store, make_turn("a"))
    assert await _ambiguous(store) == {"b"}
