import copy
import pickle

from tokenization import Appended
from tokenization.appended import Unjoined


def _appended(given: list[int]) -> Appended:
    return Appended(Unjoined(given, len(given), (8, 9)), [8], [9])


def test_prompt_is_built_once_from_the_ids_that_were_given() -> None:
    given = [5, 6]
    appended = _appended(given)
    given += [7, 7]  # ids may be added to the list before the prompt is read
    prompt_ids = appended.prompt_ids
    given.clear()
    appended.suffix_ids.clear()
    assert appended.prompt_ids is prompt_ids == [5, 6, 8, 9]


def test_joined_and_unjoined_results_are_equal() -> None:
    expected = Appended([5, 6, 8, 9], [8], [9])
    assert repr(_appended([5, 6])) == repr(expected)
    assert pickle.loads(pickle.dumps(_appended([5, 6]))) == copy.deepcopy(_appended([5, 6])) == expected
