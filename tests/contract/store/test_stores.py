"""Turns, paths, rewards, responses and documents: what `Store` promises, for every store alike."""

import asyncio
import os
from typing import Any

from msgspec.structs import replace

from tests.support.store_utils import (
    Usage,
    add,
    bare,
    digest_of,
    entry,
    make_session,
    make_turn,
    opened,
    usage,
)
from tokenproxy.record.store import DOCUMENTS, Evicted, Limits, Store
from tokenproxy.record.turn import (
    IndexedTurn,
    PromptImage,
    Segment,
    WeightSpan,
    pack_alternatives,
    pack_ids,
    pack_logprobs,
)
from tokenproxy.record.vocabulary import Cause

_EVERYTHING = make_turn(
    "tenant/räume",
    parent="f" * 32,
    choice=3,
    tools=b'[{"name": "look"}]',
    template_kwargs=b'{"a": 1}',
    messages=b'[{"role": "user"}]',
    message=b'{"content": "\xc3\xa4"}',
    appended=pack_ids([0, 1, 2**31 - 1]),
    images=(PromptImage(1, 1, "d" * 32, "image/png", b"\x89PNG"),),
    completion=pack_ids([7, 8]),
    logprobs=pack_logprobs([-0.5, float("-inf")]),
    reason="history_edited",
    finish_reason="stop",
    stop_reason=151645,
    temperature=0.7,
    off_policy=("top_p",),
    after_finish=True,
    logprobs_mode="raw_logprobs",
    logprobs_without=("temperature", "top_p"),
    replica="http://10.0.0.1:8000",
    problem="media",
    weight_versions=(WeightSpan("7", 0, 1), WeightSpan("8", 1, 2)),
    weights_uncertain=True,
    segments=(Segment("http://10.0.0.1:8000", 0, 1, "broken"), Segment("http://10.0.0.2:8000", 1, 2)),
    began_anew=("seed",),
    routed_experts="AAAA",
    routed_experts_start=3,
    sampling_mask=(pack_ids([2, 1]), pack_ids([7, 9, 8])),
    alternatives=pack_alternatives([[(b"a", -0.5), (b"\xf0\x9f", -1.0)], []]),
    cached_tokens=384,
    request_class="subagent",
    agent="agent/ä",
    parent_agent="a0",
    requested_model="haiku",
    scope=(b"t" * 16, b"k" * 16, b"m" * 16),
    spelling_before=b"\x00" * 16,
    spelling=b"\xff" * 16,
    reasonings=(b"a" * 16, b""),
    calls=(b"c" * 16, b""),
    ids_digest=b"i" * 16,
)


async def test_a_turn_comes_back_as_it_was(store: Store) -> None:
    bare = make_turn("tenant/räume")
    await store.add(make_session("tenant/räume"), [IndexedTurn(bare), IndexedTurn(_EVERYTHING, [entry("k")])])
    assert await store.turns("tenant/räume") == [_EVERYTHING, bare]
    assert await store.path(bare.id) == [bare]

    fields = {name for name in bare.__struct_fields__ if getattr(bare, name) == getattr(_EVERYTHING, name)}
    assert fields <= {
        "model",
        "source",
        "prompt_tokens",
        "created",
        "rollout",
        "prompt_turn",
    }  # all are tried


async def test_an_empty_store_holds_nothing(store: Store) -> None:
    assert await store.find([digest_of("k")]) == await store.find([]) == {}
    assert await store.claim(digest_of("k"), b"") is None
    await store.release("nothing")
    await store.pin("nothing", 2e9)
    assert await store.path("nothing") == await store.turns("nothing") == []
    assert await store.sessions(limit=10) == []
    assert not await store.delete("nothing")
    assert (await store.evict(), await usage(store)) == (Evicted(), Usage(0, 0, 0))


async def test_path_begins_with_the_first_turn(store: Store) -> None:
    turns = [make_turn()]
    for _ in range(20):
        turns.append(make_turn(parent=turns[-1].id))
    fork = make_turn(parent=turns[4].id)
    await store.add(make_session(), bare([fork, *turns[::-1]]))
    assert await store.path(turns[-1].id) == turns
    assert await store.path(fork.id) == [*turns[:5], fork]
    assert await store.path(turns[-1].id, 3) == turns[-3:]
    assert await store.path(fork.id, 6) == await store.path(fork.id, 7) == [*turns[:5], fork]
    await add(store, make_turn("other"))
    assert await store.newest("r", 2) == [fork.id, turns[-1].id]


async def test_no_path_without_all_ancestors_or_in_a_circle(store: Store) -> None:
    orphan, shares = make_turn(parent="missing"), make_turn(prompt_turn="missing")
    first, second = make_turn(), make_turn()
    first, second = replace(first, parent=second.id), replace(second, parent=first.id)
    children = [make_turn(parent=orphan.id), make_turn(parent=shares.id)]
    await store.add(make_session(), bare([orphan, shares, *children, first, second]))
    for turn in (*children, shares, first):
        assert await store.path(turn.id) == []


async def test_choices_share_the_prompt_of_one(store: Store) -> None:
    """Also along a path, and if the prompt was recorded earlier."""
    shared: dict[str, Any] = {
        "messages": b"[{}]" * 1000,
        "appended": pack_ids(range(1000)),
        "tools": b"[]",
        "template_kwargs": b"{}",
    }
    first = make_turn(**shared)
    second = make_turn(request=first.request, choice=1, prompt_turn=first.id)
    third = make_turn(parent=second.id, **shared)
    await store.add(make_session(), bare([first, second, third]))
    fourth = make_turn(request=third.request, choice=1, parent=second.id, prompt_turn=third.id)
    last = make_turn(parent=fourth.id)
    await store.add(make_session(), bare([fourth, last]))
    filled = [replace(turn, **shared) for turn in (second, fourth)]
    assert await store.path(last.id) == [*filled, last]
    assert await store.turns("r") == [first, filled[0], third, filled[1], last]
    session = await store.session("r")
    assert session is not None and session.size < 3 * 8000


async def test_adding_again_changes_nothing(store: Store) -> None:
    turn = make_turn()
    await add(store, turn, entry("k"))
    session = await store.session("r")
    changed = replace(turn, model="other")
    assert (
        await store.add(make_session(), [IndexedTurn(changed, [entry("k")]), IndexedTurn(changed)])
        == Evicted()
    )
    assert await store.turns("r") == [turn]
    assert await store.session("r") == session
    second = make_turn()
    await store.add(make_session(), bare([turn, second, second]))  # only what is new of a call
    assert (await store.turns("r"), (await usage(store)).turns) == ([turn, second], 2)


async def test_delete_leaves_nothing(store: Store) -> None:
    deleted, stays = make_turn("deleted"), make_turn("stays")
    shared, own = entry("shared", "ids"), entry("own")
    await add(store, deleted, shared, own)
    await add(store, stays, shared)
    await store.finish("deleted", Cause.REWARD, {"": 1.0})
    await store.pin("deleted", 2e9)
    left = await store.session("stays")
    assert await store.delete("deleted")
    assert not await store.delete("deleted")
    found = await store.find([shared.key, own.key])
    assert [candidate.turn for candidate in found[shared.key].groups[0].candidates] == [stays.id]
    assert found.keys() == {shared.key}
    assert await store.turns("deleted") == await store.path(deleted.id) == []
    assert await store.session("deleted") is None
    assert await store.sessions(limit=10) == [left]
    assert left is not None and await usage(store) == Usage(1, 1, left.size)
    await add(store, deleted, own)
    assert (await store.find([own.key]))[own.key].total == 1 and (await usage(store)).turns == 2


async def test_rewards_are_merged(store: Store) -> None:
    assert not await store.finish("r", Cause.REWARD, {"": 1.0})  # they need a session
    assert await store.session("r") is None and await usage(store) == Usage(0, 0, 0)
    turn = make_turn()
    await add(store, turn)
    await store.finish("r", Cause.REWARD, {turn.id: 0.1, "unknown": -2.0})
    await store.finish("r", Cause.REWARD, {"": 1e-30, turn.id: 1 / 3})
    session = await store.session("r")
    assert session is not None and session.rewards == {turn.id: 1 / 3, "unknown": -2.0, "": 1e-30}
    await store.add(make_session("s"))  # and do not use it
    before = await store.session("s")
    assert before is not None and not await store.finish("s", Cause.REWARD, {"": 1.0})
    assert await store.session("s") == replace(before, rewards={"": 1.0})


async def test_values_are_kept_read_and_removed_once(store: Store) -> None:
    long = os.urandom(50_000) + bytes(50_000)
    values = {"a": b"", "tenant/räume": long, "c": b"z{}", "": b"\x00"}
    for name, value in values.items():
        assert await store.put("x", name, value)
    assert not await store.put("x", "a", b"2", before=None)
    assert await store.put("x", "c", b"=", keep_s=60.0) and await store.put("y", "a", b"other")
    await store.evict()
    expected = {**values, "c": b"="}
    assert (
        await store.get("x") == await store.get("x", ["c", "", "never", "a", "tenant/räume", "c"]) == expected
    )
    removed = await asyncio.gather(*(store.put("x", "a", None) for _ in range(4)))
    assert sorted(removed) == [False, False, False, True]
    assert await store.put("x", "a", b"new", before=None)
    assert await store.get("x", ["a"]) == {"a": b"new"} and await store.get("y") == {"a": b"other"}
    assert await store.get("never") == await store.get("x", []) == {}


async def test_values_expire(store: Store) -> None:
    for name, keep_s in (("old", -1.0), ("new", 60.0), ("kept", None)):
        await store.put("x", name, b"1", keep_s=keep_s)
    assert (
        (await store.get("x")).keys()
        == (await store.get("x", ["old", "new", "kept"])).keys()
        == {"new", "kept"}
    )
    assert not await store.put("x", "old", None)
    assert await store.put("x", "old", b"2", keep_s=-1.0, before=None)
    assert await store.put("x", "old", b"3", before=None)
    assert await store.evict() == Evicted() and (await store.get("x"))["old"] == b"3"


async def test_what_expires_first_is_dropped_first(url: str) -> None:
    async with opened(url, Limits(document_bytes=5000)) as store:
        names = [f"d{number}" for number in range(10)]
        for name in names:
            assert await store.put(DOCUMENTS, name, bytes(1000), keep_s=60.0)
        left = {name: bytes(1000) for name in names[6:]}
        assert await store.get(DOCUMENTS) == left
        # one over the limit displaces none
        assert not await store.put(DOCUMENTS, "large", os.urandom(6000))
        assert await store.get(DOCUMENTS) == left
        for name in left:
            assert await store.put(DOCUMENTS, name, None)
        assert await store.put(DOCUMENTS, "large", os.urandom(4900))
