"""What `Store` promises, for every store alike."""

import asyncio
import time

import msgspec
import pytest

from proxy.history.store import FOUND_AT_MOST, Evicted, Session, Store, Usage
from proxy.history.turn import WeightSpan, pack_ids, pack_logprobs
from tests.stores.store_utils import key_of, make_response, make_turn

_EVERYTHING = make_turn(
    "räume/1",
    parent="f" * 32,
    choice=3,
    tools=b'[{"name": "look"}]',
    template_kwargs=b'{"a": 1}',
    messages=b'[{"role": "user"}]',
    message=b'{"content": "\xc3\xa4"}',
    appended=pack_ids([0, 1, 2**31 - 1]),
    completion=pack_ids([7, 8]),
    logprobs=pack_logprobs([-0.5, float("-inf")]),
    reason="history_edited",
    finish_reason="stop",
    stop_reason=151645,
    temperature=0.7,
    problem="media",
    weight_versions=(WeightSpan("7", 0, 1), WeightSpan("8", 1, 2)),
    routed_experts="AAAA",
    settings=(b"t" * 16, b"k" * 16, b"m" * 16),
    strict_before=b"\x00" * 16,
    strict=b"\xff" * 16,
    reasonings=(b"a" * 16, b""),
)


async def test_a_turn_comes_back_as_it_was(store: Store) -> None:
    bare = make_turn("räume/1")
    await store.add([bare, _EVERYTHING], [[], [key_of("k")]])
    assert await store.turns("räume/1") == [_EVERYTHING, bare]
    assert await store.path(bare.id) == [bare]


async def test_every_field_is_tried() -> None:
    bare = make_turn()
    same = {name for name in bare.__struct_fields__ if getattr(bare, name) == getattr(_EVERYTHING, name)}
    assert same <= {"model", "source", "prompt_tokens", "created"}


async def test_nothing_is_known_of_what_was_not_added(store: Store) -> None:
    assert await store.find([key_of("k")]) == {}
    assert await store.find([]) == {}
    assert await store.evicted([key_of("k")]) == set()
    assert await store.evicted([]) == set()
    assert await store.path("nothing") == []
    assert await store.turns("nothing") == []
    assert await store.session("nothing") is None
    assert await store.sessions(limit=10) == []
    assert await store.rewards("nothing") == {}
    assert await store.answers(b"k") == []
    assert not await store.take_response(make_response(b"k"))
    assert not await store.delete("nothing")
    assert await store.evict() == Evicted()
    assert await store.usage() == Usage(0, 0, 0)


async def test_nothing_added_makes_no_session(store: Store) -> None:
    assert await store.add([], []) == Evicted()
    assert await store.usage() == Usage(0, 0, 0)


async def test_found_by_each_key_newest_first(store: Store) -> None:
    first, second, third = make_turn("a"), make_turn("b"), make_turn("a")
    both, one = key_of("both"), key_of("one")
    await store.add([second], [[both]])
    await store.add([first, third], [[both, one], [both]])
    found = await store.find([one, key_of("unknown"), both])
    assert found == {both: [third.id, second.id, first.id], one: [first.id]}


async def test_a_key_said_twice_counts_once(store: Store) -> None:
    turn = make_turn()
    await store.add([turn], [[key_of("k"), key_of("k")]])
    assert await store.find([key_of("k")]) == {key_of("k"): [turn.id]}
    assert await store.delete("r")
    assert await store.find([key_of("k")]) == {}


@pytest.mark.parametrize("byte", [b"\x00", b"\n", b":", b"\xff"])
async def test_keys_may_hold_any_bytes(store: Store, byte: bytes) -> None:
    turn = make_turn()
    await store.add([turn], [[byte * 16]])
    assert await store.find([byte * 16]) == {byte * 16: [turn.id]}


async def test_finds_no_more_than_said(store: Store) -> None:
    turns = [make_turn(f"r{number}") for number in range(FOUND_AT_MOST + 5)]
    for turn in turns:
        await store.add([turn], [[key_of("k")]])
    newest = [turn.id for turn in reversed(turns)][:FOUND_AT_MOST]
    assert await store.find([key_of("k")]) == {key_of("k"): newest}


async def test_path_leads_from_the_first_turn(store: Store) -> None:
    turns = [make_turn()]
    for _ in range(20):
        turns.append(make_turn(parent=turns[-1].id))
    fork = make_turn(parent=turns[4].id)
    await store.add([fork, *turns[::-1]], [[]] * 22)
    assert await store.path(turns[-1].id) == turns
    assert await store.path(fork.id) == [*turns[:5], fork]


async def test_path_may_cross_rollouts(store: Store) -> None:
    first, second = make_turn("a"), make_turn("b")
    second = msgspec.structs.replace(second, parent=first.id)
    await store.add([first], [[]])
    await store.add([second], [[]])
    assert await store.path(second.id) == [first, second]
    await store.delete("a")
    assert await store.path(second.id) == []


async def test_no_path_without_all_ancestors(store: Store) -> None:
    lost = make_turn(parent="missing")
    last = make_turn(parent=lost.id)
    await store.add([lost, last], [[], []])
    assert await store.path(last.id) == []


async def test_no_path_in_a_circle(store: Store) -> None:
    one, two = make_turn(), make_turn()
    one = msgspec.structs.replace(one, parent=two.id)
    two = msgspec.structs.replace(two, parent=one.id)
    await store.add([one, two], [[], []])
    assert await store.path(one.id) == []


async def test_adding_again_changes_nothing(store: Store) -> None:
    turn = make_turn()
    await store.add([turn], [[key_of("k")]])
    session, usage = await store.session("r"), await store.usage()
    changed = msgspec.structs.replace(turn, model="other")
    assert await store.add([changed, changed], [[key_of("other")], []]) == Evicted()
    assert await store.turns("r") == [turn]
    assert await store.find([key_of("other")]) == {}
    assert await store.session("r") == session
    assert await store.usage() == usage


async def test_a_known_turn_among_new_ones(store: Store) -> None:
    known, new = make_turn(), make_turn()
    await store.add([known], [[]])
    await store.add([known, new], [[], [key_of("k")]])
    assert await store.turns("r") == [known, new]
    assert (await store.usage()).turns == 2


async def test_many_at_once(store: Store) -> None:
    turns = [make_turn(f"r{number % 10}") for number in range(300)]
    await asyncio.gather(*(store.add([turn], [[key_of(turn.id)]]) for turn in turns))
    found = await store.find([key_of(turn.id) for turn in turns])
    assert found == {key_of(turn.id): [turn.id] for turn in turns}
    usage = await store.usage()
    assert (usage.rollouts, usage.turns) == (10, 300)


async def test_usage_counts_bytes(store: Store) -> None:
    await store.add([make_turn("a"), make_turn("a")], [[key_of("1")], []])
    await store.add([make_turn("b")], [[]])
    sessions = await store.sessions(limit=10)
    usage = await store.usage()
    assert usage == Usage(2, 3, sum(session.size for session in sessions))
    assert 3 * 1000 < usage.size < 3 * 1400


@pytest.mark.parametrize("rollout, named", [("r", True), (f"{7:028x}0000", False), (f"{7:032x}", True)])
async def test_adding_makes_a_session(store: Store, rollout: str, named: bool) -> None:
    before = time.time()
    await store.add([make_turn(rollout)], [[]])
    session = await store.session(rollout)
    assert session is not None
    assert before <= session.created <= session.used <= time.time()
    expected = Session(
        id=rollout, explicit=named, created=session.created, used=session.used, turns=1, size=session.size
    )
    assert session == expected


async def test_a_described_session_keeps_its_counts(store: Store) -> None:
    described = Session(
        id="r",
        created=1.25,
        used=2.0625,
        defaults=b'{"n":1}',
        overrides=b'{"n":2}',
        metadata=b'{"x":"\xc3\xa4"}',
    )
    await store.save_session(msgspec.structs.replace(described, turns=77, size=78))
    assert await store.session("r") == described
    await store.add([make_turn()], [[]])
    counted = await store.session("r")
    assert counted is not None
    assert counted == msgspec.structs.replace(described, used=counted.used, turns=1, size=counted.size)
    await store.save_session(Session(id="r", explicit=False, created=3.0, used=4.0))
    expected = Session(id="r", explicit=False, created=3.0, used=4.0, turns=1, size=counted.size)
    assert await store.session("r") == expected
    assert await store.usage() == Usage(1, 1, counted.size)


async def test_adding_uses_a_session(store: Store) -> None:
    await store.save_session(Session(id="r", created=1.0, used=2.0))
    before = time.time()
    await store.add([make_turn()], [[]])
    session = await store.session("r")
    assert session is not None and session.created == 1.0 and session.used >= before


async def test_sessions_last_used_first_page_by_page(store: Store) -> None:
    for used in (3.0, 1.5, 5.0, 2.0, 4.0):
        await store.save_session(Session(id=f"s{used}", created=1.0, used=used))
    page = await store.sessions(limit=2)
    assert [session.used for session in page] == [5.0, 4.0]
    page = await store.sessions(limit=2, before=page[-1].used)
    assert [session.used for session in page] == [3.0, 2.0]
    page = await store.sessions(limit=2, before=page[-1].used)
    assert [session.id for session in page] == ["s1.5"]


async def test_delete_leaves_nothing(store: Store) -> None:
    gone, stays = make_turn("gone"), make_turn("stays")
    await store.add([gone], [[key_of("shared"), key_of("gone")]])
    await store.add([stays], [[key_of("shared")]])
    await store.set_rewards("gone", {"": 1.0})
    left = (await store.session("stays")).size  # type: ignore[union-attr]
    assert await store.delete("gone")
    assert not await store.delete("gone")
    assert await store.find([key_of("shared"), key_of("gone")]) == {key_of("shared"): [stays.id]}
    assert await store.evicted([key_of("shared"), key_of("gone")]) == set()
    assert await store.turns("gone") == await store.path(gone.id) == []
    assert await store.session("gone") is None
    assert await store.rewards("gone") == {}
    assert await store.usage() == Usage(1, 1, left)


async def test_a_deleted_rollout_may_come_again(store: Store) -> None:
    turn = make_turn()
    await store.add([turn], [[key_of("k")]])
    await store.delete("r")
    await store.add([turn], [[key_of("k")]])
    assert await store.find([key_of("k")]) == {key_of("k"): [turn.id]}
    assert (await store.usage()).turns == 1


async def test_rewards_add_up(store: Store) -> None:
    turn = make_turn()
    await store.add([turn], [[]])
    await store.set_rewards("r", {turn.id: 0.1, "unknown": -2.0})
    await store.set_rewards("r", {"": 1e-30, turn.id: 1 / 3})
    await store.set_rewards("r", {})
    assert await store.rewards("r") == {turn.id: 1 / 3, "unknown": -2.0, "": 1e-30}


async def test_rewards_of_an_unknown_rollout_make_it(store: Store) -> None:
    await store.set_rewards("new", {"": 1.0})
    session = await store.session("new")
    assert session is not None and session.explicit and session.turns == 0
    assert await store.rewards("new") == {"": 1.0}


async def test_rewards_do_not_use_a_session(store: Store) -> None:
    session = Session(id="r", created=1.0, used=2.0, defaults=b'{"n":1}')
    await store.save_session(session)
    await store.set_rewards("r", {"": 1.0})
    assert await store.session("r") == session


async def test_answers_newest_first(store: Store) -> None:
    first = make_response(
        b"k", status=500, headers=((b"a", b"\xff"), (b"a", b"2")), body=b"\x00", turns=("1", "2")
    )
    second, other = make_response(b"k", failed=True), make_response(b"other")
    for answer in (second, first, other, first):
        await store.keep_response(answer)
    assert await store.answers(b"k") == [second, first]
    assert await store.answers(b"other") == [other]


async def test_an_answer_is_taken_once(store: Store) -> None:
    stays, goes = make_response(b"k"), make_response(b"k")
    await store.keep_response(stays)
    await store.keep_response(goes)
    taken = await asyncio.gather(*(store.take_response(goes) for _ in range(5)))
    assert sorted(taken) == [False] * 4 + [True]
    assert await store.answers(b"k") == [stays]
