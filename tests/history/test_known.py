from typing import Any

import msgspec
import pytest

from proxy.history.evidence import PROBLEMS
from proxy.history.known import UNUSABLE, Known, KnownTurns, make_known, read_known
from proxy.history.turn import Turn, unpack_ids
from tests.samples.trees import child, root
from tokenization import ids


def _path(**last: Any) -> list[Turn]:
    one = root("1", [5, 6], [7], strict_before=b"a", strict=b"b", reasonings=(b"r",))
    two = child("2", one, [], [8, 9], strict_before=b"c", strict=b"d", reasonings=(b"", b"s"))
    return [one, two, child("3", two, [1, 2], [], **{"strict_before": b"e", "reasonings": (b"",), **last})]


def _made(path: list[Turn]) -> Known:
    """As recorded turn by turn."""
    known: Known | None = None
    for turn in path:
        prompt = (
            ids.join(known.raw, unpack_ids(turn.appended)) if known else ids.dump(unpack_ids(turn.appended))
        )
        known = make_known(turn, known, prompt, unpack_ids(turn.completion))
    assert known is not None
    return known


def test_what_is_read_is_what_was_recorded() -> None:
    path = _path()
    assert read_known(path) == _made(path)
    assert msgspec.json.decode(_made(path).raw) == [5, 6, 7, 8, 9, 1, 2]
    assert _made(path).lineage.all_reasonings() == [b"r", b"", b"s", b""]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_cannot_be_built_upon(problem: str, at: int) -> None:
    """Itself, and everything behind it."""
    path = _path()
    path[at] = msgspec.structs.replace(path[at], problem=problem)
    assert (read_known(path).usable, _made(path).usable) == (problem not in UNUSABLE,) * 2


def test_a_path_whose_numbers_do_not_add_up_cannot_be_built_upon() -> None:
    path = _path()
    path[2] = msgspec.structs.replace(path[2], prompt_tokens=8)
    assert not read_known(path).usable


@pytest.mark.parametrize("prompt", [b"", b"[]"])
def test_an_empty_prompt_cannot_be_built_upon(prompt: bytes) -> None:
    known = make_known(root("1", [], [7]), None, prompt, [7])
    assert not known.usable
    assert isinstance(msgspec.json.decode(known.raw), list)


def test_the_bytes_are_bounded_and_the_last_used_stay() -> None:
    turns = [make_known(root(str(n), [5] * 50, [6]), None, ids.dump([5] * 50), [6]) for n in range(10)]
    size = len(turns[0].raw)
    known = KnownTurns(3 * size)
    for one in turns:
        known.put(one)
        known.put(one)
        assert known.get("0") is turns[0]
    assert [n for n in range(10) if known.get(str(n)) is not None] == [0, 8, 9]
    known.drop("nobody")
    known.drop(turns[0].rollout)
    assert known.get("0") is None
    for one in turns[:3]:
        known.put(one)
    assert all(known.get(str(n)) is not None for n in range(3))


def test_one_turn_stays_however_large() -> None:
    known = KnownTurns(1)
    known.put(one := _made(_path()))
    assert known.get("3") is one
