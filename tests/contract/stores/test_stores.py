"""Turns, paths, rewards, responses and documents: what `Store` promises, for every store alike."""

import asyncio
import os
from typing import Any

from msgspec.structs import replace

from proxy.history.store import Evicted, Limits, Store, Usage
from proxy.history.turn import PromptImage, WeightSpan, pack_alternatives, pack_ids, pack_logprobs
from tests.support.store_utils import add, digest_of, entry, make_response, make_session, make_turn, opened

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
    logprobs_mode="raw_logprobs",
    replica="http://10.0.0.1:8000",
    problem="media",
    weight_versions=(WeightSpan("7", 0, 1), WeightSpan("8", 1, 2)),
    weights_uncertain=True,
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
    await store.add(make_session("tenant/räume"), [bare, _EVERYTHING], [[], [entry("k")]])
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
    assert await store.evicted([digest_of("k")]) == set()
    assert not await store.claim("nothing")
    await store.release("nothing")
    await store.pin("nothing", 2e9)
    assert await store.path("nothing") == await store.turns("nothing") == []
    assert await store.sessions(limit=10) == []
    assert not await store.delete("nothing")
    assert (await store.evict(), await store.usage()) == (Evicted(), Usage(0, 0, 0))


async def test_path_begins_with_the_first_turn(store: Store) -> None:
    turns = [make_turn()]
    for _ in range(20):
        turns.append(make_turn(parent=turns[-1].id))
    fork = make_turn(parent=turns[4].id)
    await store.add(make_session(), [fork, *turns[::-1]], [[]] * 22)
    assert await store.path(turns[-1].id) == turns
    assert await store.path(fork.id) == [*turns[:5], fork]
    await add(store, make_turn("other"))
    assert await store.newest("r", 2) == [fork.id, turns[-1].id]


async def test_no_path_without_all_ancestors_or_in_a_circle(store: Store) -> None:
    orphan, shares = make_turn(parent="missing"), make_turn(prompt_turn="missing")
    first, second = make_turn(), make_turn()
    first, second = replace(first, parent=second.id), replace(second, parent=first.id)
    children = [make_turn(parent=orphan.id), make_turn(parent=shares.id)]
    await store.add(make_session(), [orphan, shares, *children, first, second], [[]] * 6)
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
    await store.add(make_session(), [first, second, third], [[]] * 3)
    fourth = make_turn(request=third.request, choice=1, parent=second.id, prompt_turn=third.id)
    last = make_turn(parent=fourth.id)
    await store.add(make_session(), [fourth, last], [[]] * 2)
    filled = [replace(turn, **shared) for turn in (second, fourth)]
    assert await store.path(last.id) == [*filled, last]
    assert await store.turns("r") == [first, filled[0], third, filled[1], last]
    session = await store.session("r")
    assert session is not None and session.size < 3 * 8000


async def test_adding_again_changes_nothing(store: Store) -> None:
    turn = make_turn()
    await add(store, turn, entry("k"))
    session, usage = await store.session("r"), await store.usage()
    changed = replace(turn, model="other", reason="ambiguous")
    added_again = await store.add(make_session(), [changed, changed], [[entry("other", "ids")], []])
    assert added_again == Evicted()
    assert await store.turns("r") == [turn]
    assert await store.find([digest_of("other")]) == {}
    assert await store.session("r") == session
    assert await store.usage() == usage
    second = make_turn()
    await store.add(make_session(), [turn, second, second], [[], [], []])  # only what is new of a call
    assert (await store.turns("r"), (await store.usage()).turns) == ([turn, second], 2)


async def test_delete_leaves_nothing(store: Store) -> None:
    deleted, stays = make_turn("deleted"), make_turn("stays")
    shared, own = entry("shared", "ids"), entry("own")
    await add(store, deleted, shared, own)
    await add(store, stays, shared)
    await store.set_rewards("deleted", {"": 1.0})
    await store.pin("deleted", 2e9)
    left = await store.session("stays")
    assert await store.delete("deleted")
    assert not await store.delete("deleted")
    found = await store.find([shared.key, own.key])
    assert [candidate.turn for candidate in found[shared.key].groups[0].candidates] == [stays.id]
    assert found.keys() == {shared.key}
    assert await store.evicted([shared.key, own.key]) == set()
    assert await store.turns("deleted") == await store.path(deleted.id) == []
    assert await store.session("deleted") is None
    assert await store.sessions(limit=10) == [left]
    assert await store.rewards("deleted") == {}
    assert left is not None and await store.usage() == Usage(1, 1, left.size)
    await add(store, deleted, own)
    assert (await store.find([own.key]))[own.key].total == 1 and (await store.usage()).turns == 2


async def test_rewards_are_merged(store: Store) -> None:
    assert not await store.set_rewards("r", {"": 1.0})  # they need a session
    assert await store.session("r") is None and await store.usage() == Usage(0, 0, 0)
    turn = make_turn()
    await add(store, turn)
    assert await store.set_rewards("r", {turn.id: 0.1, "unknown": -2.0})
    assert await store.set_rewards("r", {"": 1e-30, turn.id: 1 / 3})
    assert await store.set_rewards("r", {})
    assert await store.rewards("r") == {turn.id: 1 / 3, "unknown": -2.0, "": 1e-30}
    await store.save_session(make_session("s", used=2.0))  # and do not use it
    session = await store.session("s")
    assert await store.set_rewards("s", {"": 1.0}) and await store.session("s") == session


async def test_responses_come_newest_first_and_are_taken_once(store: Store) -> None:
    first = make_response(
        b"k", request=b"q" * 16, status=500, headers=((b"a", b"\xff"), (b"a", b"2")), body=b"\0"
    )
    second, other = make_response(b"k", failed=True), make_response(b"other")
    for response in (second, first, other, first):
        await store.keep_response(response)
    assert await store.responses(b"k") == [second, first]
    taken = await asyncio.gather(*(store.take_response(second) for _ in range(5)))
    assert sorted(taken) == [False] * 4 + [True]
    assert (await store.responses(b"k"), await store.responses(b"other")) == ([first], [other])


async def test_the_newest_change_of_a_replica_counts(store: Store) -> None:
    assert await store.replica_changes("fleet") == {}
    await store.change_replica("fleet", "http://a:1", "added")
    await store.change_replica("fleet", "http://räume:1/path", "drained")
    await store.change_replica("fleet", "http://a:1", "removed")
    expected = {"http://a:1": "removed", "http://räume:1/path": "drained"}
    assert await store.replica_changes("fleet") == expected
    await store.change_replica("fleet", "http://a:1", None)
    assert await store.replica_changes("fleet") == {"http://räume:1/path": "drained"}


def _content(size: int) -> bytes:
    return b'{"x":"%s"}' % (b"x" * size)


async def test_documents_are_written_read_and_deleted_once(store: Store) -> None:
    documents = {"a": _content(1), "tenant/räume": _content(100_000), "c": b"{}"}
    for name, content in documents.items():
        await store.documents.keep(name, content)
    await store.documents.keep("a", _content(2))  # the first stays
    await store.evict()
    assert await store.documents.read(["tenant/räume", "a", "never", "c", "a"]) == documents
    deleted = await asyncio.gather(*(store.documents.delete("a") for _ in range(4)))
    assert sorted(deleted) == [False] * 3 + [True]
    assert await store.documents.read(["a", "c"]) == {"c": b"{}"}


async def test_the_oldest_documents_are_dropped_first(whole_url: str) -> None:
    async with opened(whole_url, Limits(document_bytes=5000)) as store:
        names = [f"d{number}" for number in range(10)]
        for name in names:
            await store.documents.keep(name, _content(1000))
        assert list(await store.documents.read(names)) == names[6:]
        # one over the limit displaces none
        await store.documents.keep("large", os.urandom(6000))
        assert list(await store.documents.read([*names, "large"])) == names[6:]
