import copy
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from tokenization import Appended, InvalidIds
from tokenization.appended import Unjoined


def _appended(given: list[int]) -> Appended:
    return Appended(Unjoined(given, len(given), (8, 9)), [8], [9])


def test_prompt_is_built_once_from_the_ids_that_were_given() -> None:
    given = [5, 6]
    appended = _appended(given)
    given += [7, 7]  # ids may be added to the list before the prompt is read
    prompt_ids = appended.prompt_ids
    assert prompt_ids == [5, 6, 8, 9]
    given.clear()
    appended.suffix_ids.clear()
    assert appended.prompt_ids is prompt_ids == [5, 6, 8, 9]


def test_given_ids_are_not_read_before_the_prompt() -> None:
    class Unreadable(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("copied")

    appended = _appended(Unreadable([5, 6]))
    assert (appended.close_ids, appended.suffix_ids) == ([8], [9])
    with pytest.raises(AssertionError, match="copied"):
        _ = appended.prompt_ids


def test_shortened_list_raises_invalid_ids() -> None:
    given = [5, 6]
    appended = _appended(given)
    given.pop()
    with pytest.raises(InvalidIds, match="shortened"):
        _ = appended.prompt_ids


def test_joined_and_unjoined_results_are_equal_frozen_dataclasses() -> None:
    expected = Appended([5, 6, 8, 9], [8], [9])
    assert _appended([5, 6]) == expected
    assert repr(_appended([5, 6])) == repr(expected)
    assert asdict(_appended([5, 6]))["prompt_ids"] == [5, 6, 8, 9]
    assert replace(_appended([5, 6]), suffix_ids=[]) == Appended([5, 6, 8, 9], [8], [])
    assert pickle.loads(pickle.dumps(_appended([5, 6]))) == copy.deepcopy(_appended([5, 6])) == expected
    with pytest.raises(FrozenInstanceError):
        _appended([5]).prompt_ids = [6]  # type: ignore[misc]
    with pytest.raises(TypeError, match="prompt_ids"):
        Appended()  # type: ignore[call-arg]
