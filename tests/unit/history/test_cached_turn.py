from typing import Any

import msgspec
import pytest

from proxy.history.cache import UNUSABLE, CachedTurn, cached_turn, hash_ids, read_turn
from proxy.history.turn import Turn, unpack_ids
from proxy.history.vocabulary import Problem
from tests.support.trees import child, root
from tokenization import ids


def _path(**last: Any) -> list[Turn]:
    one = root("1", [5, 6], [7], spelling_before=b"a", spelling=b"b", reasonings=(b"r",), scope=(b"x",))
    two = child("2", one, [], [8, 9], spelling_before=b"c", reasonings=(b"", b"s"), calls=(b"t",))
    return [one, two, child("3", two, [1, 2], [], **{"spelling_before": b"e", "reasonings": (b"",), **last})]


def _recorded(path: list[Turn]) -> CachedTurn:
    """As recorded turn by turn."""
    cached: CachedTurn | None = None
    for turn in path:
        appended = unpack_ids(turn.appended)
        prompt = ids.join(cached.ids, appended) if cached else ids.dump(appended)
        cached = cached_turn(turn, cached, prompt, hash_ids(cached, turn.appended, turn.completion))
    assert cached is not None
    return cached


def test_turn_read_from_a_store_equals_the_one_recorded() -> None:
    path = _path()
    assert read_turn(path) == _recorded(path)
    assert msgspec.json.decode(_recorded(path).ids) == [5, 6, 7, 8, 9, 1, 2]
    assert _recorded(path).reasonings == (b"r", b"", b"s", b"")


@pytest.mark.parametrize("cached", [1, 2, 3])
def test_ids_of_a_cached_beginning_are_continued(cached: int) -> None:
    path = _path()
    beginning = _recorded(path[:cached])
    found = read_turn(path, lambda turn: beginning if turn == beginning.id else None)
    assert found == _recorded(path)
    assert found.hasher.digest() == _recorded(path).hasher.digest()


def test_equal_ids_have_equal_digests_however_turns_divide_them() -> None:
    whole = root("w", [5, 6, 7, 8, 9, 1], [2])
    path = [*_path()[:2], child("3", _path()[1], [1], [2])]
    assert read_turn([whole]).hasher.digest() == read_turn(path).hasher.digest()
    assert read_turn(path[:2]).hasher.digest() != read_turn(path).hasher.digest()


@pytest.mark.parametrize("problem", Problem)
@pytest.mark.parametrize("at", [0, 2])
def test_problem_of_a_turn_makes_it_and_all_after_it_unusable(problem: Problem, at: int) -> None:
    path = _path()
    path[at] = msgspec.structs.replace(path[at], problem=problem)
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
