"""The cache of conversations: what is parsed with it equals what is parsed without, within its bytes."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.history.cache import CachedTurn, TurnCache, cached_turn, hash_ids
from proxy.history.conversation import Conversation
from tests.support.trees import root
from tokenization import ids

_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text()}),
    min_size=1,
    max_size=6,
)
_SPELLINGS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}])


def _parse(cache: TurnCache, messages: list[dict[str, Any]], **spelling: Any) -> Conversation:
    return cache.parse(json.dumps(messages, **spelling).encode())


@given(st.lists(_MESSAGES, min_size=1, max_size=4), _SPELLINGS, st.sampled_from([0, 5_000, 2**20]))
def test_conversations_are_the_same_with_and_without_a_history_seen_before(
    parts: list[list[dict[str, Any]]], spelling: dict[str, Any], size: int
) -> None:
    cache, history = TurnCache(size), list[dict[str, Any]]()
    for part in parts:
        history = history + part
        seen, fresh = _parse(cache, history, **spelling), _parse(TurnCache(0), history, **spelling)
        assert (list(seen.raws), list(seen.messages)) == (list(fresh.raws), list(fresh.messages))


def _continued(
    name: str, before: CachedTurn | None, appended: list[int], sampled: list[int], rollout: str = "r"
) -> CachedTurn:
    count = (before.count if before else 0) + len(appended)
    parent = before.id if before else None
    turn = replace(root(name, appended, sampled, rollout=rollout), parent=parent, prompt_tokens=count)
    prompt = ids.join(before.ids, appended) if before else ids.dump(appended)
    return cached_turn(turn, before, prompt, hash_ids(before, turn.appended, turn.completion))


def _turn(name: str, length: int) -> CachedTurn:
    return _continued(name, None, [5] * length, [6], rollout=f"r{name}")


def test_turns_stay_while_they_are_used() -> None:
    cache = TurnCache(5_000)
    first = _turn("first", 100)
    cache.put(first)
    for n in range(20):
        cache.put(_turn(str(n), 100))
        assert cache.turn("first") is first
    assert cache.turn("0") is None
    cache.drop("rfirst")
    assert cache.turn("first") is None


def test_turns_that_continue_each_other_are_held_once() -> None:
    cache = TurnCache(2**20)
    turns: list[CachedTurn] = []
    for number in range(50):
        before = turns[-1] if turns else None
        turns.append(_continued(f"{number}", before, [7] * 100, [8] * 100))
        cache.put(turns[-1], before.id if before else None)
    assert cache.size < 2 * turns[-1].size + 50 * 1_000
    for turn in turns:
        found = cache.turn(turn.id)
        assert found is not None
        assert (found, found.ids) == (turn, turn.ids)
    cache.drop("r")
    assert (cache.size, cache.turn("0"), cache.turn("49")) == (0, None, None)


def test_a_chain_is_evicted_as_a_whole() -> None:
    cache = TurnCache(9_000)
    first = _continued("first", None, [1] * 100, [2])
    second = _continued("second", first, [1] * 100, [2])
    cache.put(first)
    cache.put(second, "first")
    for number in range(20):
        cache.put(_turn(f"{number}", 100))
    assert (cache.turn("first"), cache.turn("second")) == (None, None)
    cache.put(second, "first")  # whose parent is gone
    found = cache.turn("second")
    assert found is not None
    assert found.ids == second.ids
