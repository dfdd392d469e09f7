"""Sessions: how they come about, their order, and which become ambiguous, for every store alike."""

import asyncio
import math
import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.store_utils import Usage, add, bare, entry, make_session, make_turn, usage
from tokenproxy.record.store import DESCRIPTION, Evicted, Session, Store
from tokenproxy.record.turn import request_time

_DESCRIBED = Session(
    id="tenant/r",
    tenant="tenant",
    explicit=False,
    created=1.25,
    defaults=b'{"n":1}',
    overrides=b'{"n":2}',
    metadata=b'{"x":"\xc3\xa4"}',
    limits=b'{"turns":3}',
    policy=b'{"top_p":1}',
)
_DESCRIPTION_SIZE = sum(len(getattr(_DESCRIBED, name)) for name in DESCRIPTION)
_SAMPLED = make_turn().completion_tokens


async def _session(store: Store, rollout: str = "r") -> Session:
    session = await store.session(rollout)
    assert session is not None
    return session


async def _ambiguous(store: Store) -> set[str]:
    return {session.id for session in await store.sessions(limit=1000) if session.ambiguous}


async def test_adding_creates_the_session_or_uses_it(store: Store) -> None:
    before, first = time.time(), make_turn(_DESCRIBED.id)
    for turns, described in enumerate((_DESCRIBED, make_session(_DESCRIBED.id)), 1):
        given = replace(described, turns=77, size=78, sampled_ids=79, first_turn=80.0)
        turn = first if turns == 1 else make_turn(_DESCRIBED.id)
        for _ in range(2):  # a turn that is written again counts once
            await store.add(given, bare([turn]))
        session = await _session(store, _DESCRIBED.id)
        assert before <= session.used <= time.time()
        counts: dict[str, Any] = {"turns": turns, "sampled_ids": turns * _SAMPLED, "size": session.size}
        counts["first_turn"] = request_time(first.id)
        assert session == replace(_DESCRIBED, used=session.used, **counts)
        assert session.size > _DESCRIPTION_SIZE
        assert await usage(store) == Usage(1, turns, session.size)


async def test_a_saved_session_keeps_the_counts_of_the_store(store: Store) -> None:
    assert await store.add(replace(_DESCRIBED, turns=77, size=78, ambiguous=True)) == Evicted()
    described = await _session(store, _DESCRIBED.id)
    saved = replace(_DESCRIBED, size=_DESCRIPTION_SIZE, used=described.used)
    assert described == saved
    turn = make_turn(_DESCRIBED.id)
    await store.add(replace(_DESCRIBED, ambiguous=True), bare([turn]))
    counted = await _session(store, _DESCRIBED.id)
    counts: dict[str, Any] = {"turns": 1, "sampled_ids": _SAMPLED, "first_turn": request_time(turn.id)}
    assert counted == replace(saved, used=counted.used, size=counted.size, ambiguous=True, **counts)
    plain = Session(id=_DESCRIBED.id, tenant="tenant", created=3.0)
    await store.add(plain)
    size = counted.size - _DESCRIPTION_SIZE + len(DESCRIPTION) * len(b"{}")
    last = await _session(store, _DESCRIBED.id)
    assert last == replace(plain, ambiguous=True, size=size, used=last.used, **counts)
    assert await usage(store) == Usage(1, 1, size)


async def test_concurrent_descriptions_keep_the_fields_of_each_other(store: Store) -> None:
    """Each of them read the session before the others wrote: there was none, then that of the first round."""
    for written in (_DESCRIBED, replace(_DESCRIBED, **dict.fromkeys(DESCRIPTION, b'{"longer":1}'))):
        before = await store.session(written.id) or make_session(written.id, tenant="tenant")
        given = [(name, replace(before, **{name: getattr(written, name)})) for name in DESCRIPTION]
        await asyncio.gather(*(store.add(session, fields=[name]) for name, session in given))
        saved = await _session(store, written.id)
        assert [getattr(saved, name) for name in DESCRIPTION] == [
            getattr(written, name) for name in DESCRIPTION
        ]
        assert await usage(store) == Usage(1, 0, written.description_bytes)


async def test_pinning_uses_a_session(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.add(make_session())
    before = time.time()
    await store.pin("r", 1.0)
    assert before <= (await _session(store)).used <= time.time()
    await store.pin("missing", before + 1000)
    assert await store.session("missing") is None
    # the time of use is not turned back
    monkeypatch.setattr(time, "time", lambda: before - 1000)
    await add(store, make_turn())
    await store.pin("r", before)
    assert before < (await _session(store)).used < before + 60


async def _pages(store: Store, limit: int, **options: Any) -> list[list[str]]:
    """The ids of all sessions, page by page."""
    pages: list[list[str]] = []
    before = math.inf
    while page := await store.sessions(limit=limit, before=before, **options):
        pages.append([session.id for session in page])
        assert len(pages) < 100
        before = page[-1].used
    return pages


@pytest.mark.parametrize("limit", [1, 3])
async def test_sessions_come_in_the_order_of_their_use(
    store: Store, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are used in the same instant, and if the clock is set back."""
    names = ["B", "a", "ä", "", "0", "used", "turn"]
    for clock, used in ((1e9, names), (1e9, ["used"]), (5e8, ["saved"])):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        for name in used:
            await store.add(make_session(name))
    await add(store, make_turn("turn"))
    listed = [name for page in await _pages(store, limit) for name in page]
    assert listed == ["turn", "saved", "used", "0", "", "ä", "a", "B"]
    assert await store.sessions(limit=0) == []


async def test_sessions_of_one_tenant(store: Store) -> None:
    for number in range(10):
        tenant = ["", "t", "u"][number % 3]
        await store.add(make_session(f"{tenant}/{number}", tenant=tenant))
    await add(store, make_turn("t/1"))
    assert await _pages(store, 2, tenant="t") == [["t/1", "t/7"], ["t/4"]]
    assert await _pages(store, 2, tenant="u") == [["u/8", "u/5"], ["u/2"]]
    assert await _pages(store, 9, tenant="") == [["/9", "/6", "/3", "/0"]]
    await store.delete("t/7")
    assert await _pages(store, 9, tenant="t") == [["t/1", "t/4"]]
    await store.add(make_session("t/4", tenant="u"))  # its tenant changes
    assert await _pages(store, 9, tenant="t") == [["t/1"]]
    assert await _pages(store, 9, tenant="u") == [["t/4", "u/8", "u/5", "u/2"]]


async def test_a_session_stays_ambiguous(store: Store) -> None:
    for ambiguous in (True, False):
        session = make_session("b", ambiguous=ambiguous)
        await store.add(session, bare([make_turn("b")]))
    await add(store, make_turn("a"), entry("k", "ids"))
    await store.add(make_session("b"))
    assert await _ambiguous(store) == {"b"}
