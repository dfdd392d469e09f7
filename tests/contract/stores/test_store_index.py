"""Finding turns, and which of them are open, for every store alike."""

import asyncio
import random

import pytest

from proxy.history.store import FOUND_AT_MOST, Candidate, CandidateGroup, Found, Store
from proxy.history.turn import Turn
from tests.support.store_utils import add, digest_of, entry, make_session, make_turn

_KEY = digest_of("k")


def _group(ids: str, *candidates: tuple[Turn, bool]) -> CandidateGroup:
    listed = [Candidate(turn.id, turn.rollout, open) for turn, open in candidates]
    return CandidateGroup(digest_of(ids) if ids else b"", len(listed), listed)


async def _candidates(store: Store) -> list[tuple[str, bool]]:
    """Of the first group under the key."""
    found = await store.find([_KEY])
    return [(candidate.turn, candidate.open) for candidate in found[_KEY].groups[0].candidates]


async def test_found_by_each_key_newest_first(store: Store) -> None:
    first, second, third = make_turn("a"), make_turn("b"), make_turn("a")
    both, other = entry("both"), entry("other", "ids")
    await add(store, second, both)
    # the same entry twice counts once
    await store.add(make_session("a"), [first, third], [[both, other, other], [both]])
    unknown = [digest_of(str(number)) for number in range(600)]
    assert await store.find([other.key, *unknown, both.key]) == {
        both.key: Found(3, [_group("", (third, True), (second, True), (first, True))]),
        other.key: Found(1, [_group("ids", (first, True))]),
    }


async def test_a_turn_is_open_until_it_is_continued(store: Store) -> None:
    parent, other = make_turn(), make_turn()
    await store.add(make_session(), [parent, other], [[entry("k", "ids")]] * 2)
    assert await _candidates(store) == [(other.id, True), (parent.id, True)]
    await add(store, make_turn(parent=other.id))
    assert await _candidates(store) == [(parent.id, True), (other.id, False)]
    assert not await store.claim(other.id)
    # nor is one that was claimed and then continued
    assert await store.claim(parent.id)
    await add(store, make_turn(parent=parent.id))
    for turn in (other, parent):
        await store.release(turn.id)
    assert await _candidates(store) == [(other.id, False), (parent.id, False)]
    assert not await store.claim(parent.id)


async def test_a_child_in_another_rollout_continues_a_turn(whole_store: Store) -> None:
    parent = make_turn("a")
    await add(whole_store, parent, entry("k"))
    await add(whole_store, make_turn("b", parent=parent.id))
    await whole_store.delete("b")
    await whole_store.release(parent.id)
    assert await _candidates(whole_store) == [(parent.id, False)]


async def test_a_turn_is_claimed_once_until_it_is_released(store: Store) -> None:
    turn = make_turn()
    await add(store, turn, entry("k", "ids"), entry("explaining"))
    await store.release(turn.id)
    for _ in range(2):
        claimed = await asyncio.gather(*(store.claim(turn.id) for _ in range(5)))
        assert sorted(claimed) == [False] * 4 + [True]
        assert await store.find([_KEY, digest_of("explaining")]) == {
            _KEY: Found(1, [_group("ids", (turn, False))]),
            digest_of("explaining"): Found(1, [_group("", (turn, False))]),
        }
        await store.release(turn.id)
        await store.release(turn.id)
        assert await _candidates(store) == [(turn.id, True)]
    assert await store.claim(turn.id)
    await store.delete("r")
    await add(store, turn, entry("k"))  # of the claim nothing is left
    assert await _candidates(store) == [(turn.id, True)]


@pytest.mark.parametrize("seed", range(3))
async def test_groups_of_all_sizes(store: Store, seed: int) -> None:
    """Compared with a plain count. Sizes at which a returned group, or what is read at once, is just full."""
    chosen = random.Random(seed)
    sizes = [chosen.choice([1, 2, 15, 16, 17, 63, 64, 65, 130]) for _ in range(chosen.randrange(3, 20))]
    names = [name for number, size in enumerate(sizes) for name in [f"ids{number}" if number else ""] * size]
    chosen.shuffle(names)
    turns = [make_turn(str(number % 7), completion=b"") for number in range(len(names))]
    for rollout in range(7):
        entries = [[entry("k", name), entry(name)] for name in names[rollout::7]]
        await store.add(make_session(str(rollout)), turns[rollout::7], entries)
    claimed = chosen.sample(turns, len(turns) // 2)
    assert all(await asyncio.gather(*(store.claim(turn.id) for turn in claimed)))
    await store.delete("3")

    closed = {turn.id for turn in claimed}
    members: dict[str, list[tuple[Turn, bool]]] = {}
    for name, turn in zip(names, turns, strict=True):
        if turn.rollout != "3":
            members.setdefault(name, []).append((turn, turn.id not in closed))
    groups = []
    for name, listed in members.items():
        listed.sort(key=lambda member: (member[1], member[0].id), reverse=True)
        group = _group(name, *listed[:FOUND_AT_MOST])._replace(total=len(listed))
        groups.append((max(turn.id for turn, _ in listed), group))
    groups.sort(reverse=True)
    total = sum(group.total for _, group in groups)
    expected = Found(total, [group for _, group in groups[:FOUND_AT_MOST]])
    assert await store.find([_KEY]) == {_KEY: expected}
