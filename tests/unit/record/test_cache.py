"""The cache: what is parsed or read with it equals what is parsed or read without, within its bytes."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from chat_tokenizer import ids
from tests.support.trees import child, root
from tokenproxy.record.cache import UNUSABLE, CachedTurn, TurnCache, cached_turn, hash_ids, read_turn
from tokenproxy.record.identity import Conversation
from tokenproxy.record.store import RecordDamaged
from tokenproxy.record.turn import Turn, pack_ids, unpack_ids
from tokenproxy.record.vocabulary import Problem

_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text()}),
    min_size=1,
    max_size=6,
)
_SPELLINGS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}])


def _parse(cache: TurnCache, messages: list[dict[str, Any]], **spelling: Any) -> Conversation:
    return cache.parse(cache.recall(json.dumps(messages, **spelling).encode()))


@given(st.lists(_MESSAGES, min_size=1, max_size=4), _SPELLINGS, st.sampled_from([0, 5_000, 2**20]))
def test_conversations_are_the_same_with_and_without_a_history_seen_before(
    parts: list[list[dict[str, Any]]], spelling: dict[str, Any], size: int
) -> None:
    cache, history = TurnCache(size), list[dict[str, Any]]()
    for part in parts:
        history = history + part
        seen, fresh = _parse(cache, history, **spelling), _parse(TurnCache(0), history, **spelling)
        assert (list(seen.raws), list(seen.messages)) == (list(fresh.raws), list(fresh.messages))


@pytest.mark.parametrize("checksum", [zlib.crc32, lambda *_: 7])
def test_forks_and_equal_checksums_lead_to_no_other_conversation(
    checksum: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zlib, "crc32", checksum)
    cache = TurnCache(2**20)
    for texts in ("a", "ab", "abc", "abd", "abde", "ab", "b", "abc"):
        messages = [{"role": "user", "content": text} for text in texts]
        assert _parse(cache, messages).messages == _parse(TurnCache(0), messages).messages


def test_equal_requests_at_once_are_one_history() -> None:
    """The samples of a group arrive together: all have looked before the first one is kept."""
    cache, messages = TurnCache(2**20), json.dumps([{"role": "user", "content": "a"}]).encode()
    recalled = [cache.recall(messages) for _ in range(16)]
    cache.parse(recalled[0])
    size = cache.size
    for each in recalled[1:]:
        cache.parse(each)
    assert cache.size == size > 0


def _continued(
    name: str, before: CachedTurn | None, appended: list[int], sampled: list[int], rollout: str = "r"
) -> CachedTurn:
    count = (before.count if before else 0) + len(appended)
    parent = before.id if before else None
    turn = replace(root(name, appended, sampled, rollout=rollout), parent=parent, prompt_tokens=count)
    return _cached(before, turn)


def _cached(before: CachedTurn | None, turn: Turn) -> CachedTurn:
    """A turn as it is cached when it was recorded."""
    own = unpack_ids(turn.appended + turn.completion)
    data = ids.join(before.ids, own) if before else ids.dump(own)
    return cached_turn([turn], before, data, hash_ids(before, turn.appended, turn.completion))


def _turn(name: str, length: int) -> CachedTurn:
    return _continued(name, None, [5] * length, [6], rollout=f"r{name}")


def _facts(turn: CachedTurn) -> dict[str, Any]:
    """All fields of a turn, its ids and their digest."""
    return {**asdict(turn), "chain": turn.ids, "hasher": turn.hasher.digest()}


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
    assert cache.size < 2 * turns[-1].size + 50 * 2_000
    for turn in turns:
        found = cache.turn(turn.id)
        assert found is not None
        assert _facts(found) == _facts(turn)
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


def _path(**last: Any) -> list[Turn]:
    one = root("1", [5, 6], [7], spelling_before=b"a", spelling=b"b", reasonings=(b"r",), scope=(b"x",))
    two = child("2", one, [], [8, 9], spelling_before=b"c", reasonings=(b"", b"s"), calls=(b"t",))
    return [one, two, child("3", two, [1, 2], [], **{"spelling_before": b"e", "reasonings": (b"",), **last})]


def _recorded(path: list[Turn]) -> CachedTurn:
    """As recorded turn by turn."""
    cached: CachedTurn | None = None
    for turn in path:
        cached = _cached(cached, turn)
    assert cached is not None
    return cached


def test_turn_read_from_a_store_equals_the_one_recorded() -> None:
    path = _path()
    assert _facts(read_turn(path)) == _facts(_recorded(path))
    assert msgspec.json.decode(_recorded(path).ids) == [5, 6, 7, 8, 9, 1, 2]
    assert _recorded(path).reasonings == (b"r", b"", b"s", b"")


def test_ids_that_changed_in_the_store_are_refused() -> None:
    path = _path(ids_digest=_recorded(_path()).hasher.digest())
    assert _facts(read_turn(path)) == _facts(_recorded(path))
    path[1] = replace(path[1], completion=pack_ids([8, -9]))
    with pytest.raises(RecordDamaged):
        read_turn(path)


@pytest.mark.parametrize("cached", [1, 2])
def test_ids_of_a_cached_beginning_are_continued(cached: int) -> None:
    path = _path()
    beginning = _recorded(path[:cached])
    assert _facts(read_turn(path[cached:], beginning)) == _facts(_recorded(path))


def test_equal_ids_have_equal_digests_however_turns_divide_them() -> None:
    whole = root("w", [5, 6, 7, 8, 9, 1], [2])
    path = [*_path()[:2], child("3", _path()[1], [1], [2])]
    assert read_turn([whole]).hasher.digest() == read_turn(path).hasher.digest()
    assert read_turn(path[:2]).hasher.digest() != read_turn(path).hasher.digest()


@pytest.mark.parametrize("problem", Problem)
@pytest.mark.parametrize("at", [0, 2])
def test_problem_of_a_turn_makes_it_and_all_after_it_unusable(problem: Problem, at: int) -> None:
    path = _path()
    path[at] = replace(path[at], problem=problem)
    assert (read_turn(path).usable, _recorded(path).usable) == (problem not in UNUSABLE,) * 2


@pytest.mark.parametrize(
    "prompt, begins",
    [
        (b"[5,6,7]", True),
        (b"[5,6,7,1]", True),
        (b"[5,6,70]", False),
        (b"[5,6]", False),
        (b"[1,5,6,7]", False),
    ],
)
def test_prompt_begins_with_the_ids_of_a_turn(prompt: bytes, begins: bool) -> None:
    assert read_turn([root("1", [5, 6], [7])]).begins(prompt) is begins
