"""Finding turns, and which of them are open, for every store alike."""

import asyncio
import random

import pytest

from tests.support.store_utils import add, digest_of, entry, make_session, make_turn
from tokenproxy.record.store import Store
from tokenproxy.record.turn import FOUND_AT_MOST, Candidate, CandidateGroup, Found, IndexedTurn, Turn

_KEY = digest_of("k")


def _group(ids: str, *turns: Turn) -> CandidateGroup:
    listed = [Candidate(turn.id, turn.rollout) for turn in turns]
    return CandidateGroup(digest_of(ids) if ids else b"", len(listed), listed)


async def _claimed(store: Store, ids: str = "ids") -> str | None:
    return await store.claim(_KEY, digest_of(ids))


async def test_found_by_each_key_newest_first(store: Store) -> None:
    first, second, third = make_turn("a"), make_turn("b"), make_turn("a")
    both, other = entry("both"), entry("other", "ids")
    await add(store, second, both)
    # the same entry twice counts once
    await store.add(make_session("a"), [IndexedTurn(first, [both, other, other]), IndexedTurn(third, [both])])
    unknown = [digest_of(str(number)) for number in range(600)]
    assert await store.find([other.key, *unknown, both.key]) == {
        both.key: Found(3, [_group("", third, second, first)]),
        other.key: Found(1, [_group("ids", first)]),
    }


async def test_a_turn_is_open_until_it_is_continued(store: Store) -> None:
    parent, other = make_turn(), make_turn()
    await store.add(make_session(), [IndexedTurn(turn, [entry("k", "ids")]) for turn in (parent, other)])
    await add(store, make_turn(parent=other.id))
    # nor is one that was claimed and then continued
    assert await _claimed(store) == parent.id
    await add(store, make_turn(parent=parent.id))
    for turn in (other, parent):
        await store.release(turn.id)
    assert await _claimed(store) is None


async def test_a_turn_is_claimed_once_until_it_is_released(store: Store) -> None:
    turn = make_turn()
    await add(store, turn, entry("k", "ids"), entry("explaining"))
    await store.release(turn.id)
    for _ in range(2):
        claimed = await asyncio.gather(*(_claimed(store) for _ in range(5)))
        assert sorted(map(str, claimed)) == sorted([*["None"] * 4, turn.id])
        assert await _claimed(store, "others") is None
        await store.release(turn.id)
        await store.release(turn.id)
    assert await _claimed(store) == turn.id
    await store.delete("r")
    assert await _claimed(store) is None
    await add(store, turn, entry("k", "ids"))  # of the claim nothing is left
    assert await _claimed(store) == turn.id


async def test_each_of_many_turns_is_claimed_once(store: Store) -> None:
    turns = [make_turn(f"r{number}", completion=b"") for number in range(200)]
    for turn in turns:
        await add(store, turn, entry("k", "ids"))
    claimed = [each for _ in range(50) for each in await asyncio.gather(*(_claimed(store) for _ in range(4)))]
    assert set(claimed) == {turn.id for turn in turns}
    assert await _claimed(store) is None


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
        await store.add(make_session(str(rollout)), list(map(IndexedTurn, turns[rollout::7], entries)))
    await store.delete("3")
    members: dict[str, list[Turn]] = {}
    for name, turn in zip(names, turns, strict=True):
        if turn.rollout != "3":
            members.setdefault(name, []).append(turn)
    groups = {}
    for name, of_name in members.items():
        of_name.sort(key=lambda turn: turn.id, reverse=True)
        group = _group(name, *of_name[:FOUND_AT_MOST])._replace(total=len(of_name))
        groups[group.ids] = group
    found = (await store.find([_KEY]))[_KEY]
    assert found.total == sum(group.total for group in groups.values())
    if found.total == sum(group.total for group in found.groups):  # all are listed
        assert {group.ids: group for group in found.groups} == groups
    else:
        assert found.total > FOUND_AT_MOST and len(groups) > 1
        for group in found.groups:
            listed = groups[group.ids].candidates[: len(group.candidates)]
            assert group.candidates == listed and group.total <= groups[group.ids].total
