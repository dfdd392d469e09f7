"""Where a prompt broke with what was recorded, and what its lane shows."""

import json
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer
from tests.support.tiny_model import CHATML, TinyModel
from tests.support.trees import child, root
from tests.support.viewer.small_session import small_session
from tokenproxy.record.turn import Turn
from tokenproxy.viewer.breaks import Break, breaks_of
from tokenproxy.viewer.drift import Basis, Change, drift_lane

_CONTINUES = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).encode()


def _root(name: str, prompt: list[int], completion: list[int], **fields: Any) -> Turn:
    return root(name, prompt, completion, **{"messages": _CONTINUES, "reason": "no_match", **fields})


def test_the_earlier_turn_with_most_equal_ids_is_meant() -> None:
    a = _root("a", [1, 2], [3, 4], reason="first_turn")
    b = _root("b", [1, 9], [3, 4], reason="first_turn")
    c = _root("c", [1, 2, 3, 7, 8], [5])
    assert breaks_of([c, b, a]) == {"c": Break("a", 3, 4)}


def test_a_prompt_that_holds_all_earlier_ids_did_not_drift() -> None:
    a = _root("a", [1, 2], [3, 4], reason="first_turn")
    c = _root("c", [1, 2, 3, 4, 5], [6])
    assert breaks_of([a, c]) == {"c": Break("a", 4, 4)}


def test_the_ids_of_an_earlier_turn_are_those_of_its_path() -> None:
    a = _root("a", [1, 2], [3], reason="first_turn")
    b = child("b", a, [4], [5, 6])
    c = _root("c", [1, 2, 3, 4, 5, 0], [9])
    assert breaks_of([a, b, c]) == {"c": Break("b", 5, 6)}


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": "first_turn"},
        {"messages": b'[{"role": "user", "content": "assistant"}]'},
    ],
)
def test_a_turn_that_continues_nothing_has_no_break(fields: dict[str, Any]) -> None:
    a = _root("a", [1, 2], [3, 4], reason="first_turn")
    assert breaks_of([a, _root("c", [1, 2, 8], [5], **fields)]) == {}


def test_ids_that_a_client_gave_continue_what_they_share_sampled_ids_with() -> None:
    a = _root("a", [1, 2], [3, 4], reason="first_turn")
    given = {"messages": b"[]", "reason": "ids_given", "source": "given"}
    assert breaks_of([a, _root("c", [1, 2, 3, 8], [5], **given)]) == {"c": Break("a", 3, 4)}
    assert breaks_of([a, _root("c", [1, 2, 8], [5], **given)]) == {}


def test_a_prompt_that_is_sampled_from_again_is_no_drift() -> None:
    first = _root("a", [1, 2], [3, 4], reason="first_turn")
    again = _root("b", [1, 2], [7], reason="no_match")
    assert breaks_of([first, again]) == {}


def test_all_choices_of_a_request_break_with_the_same_turn() -> None:
    a = _root("00", [1, 2], [3, 4], reason="first_turn")
    choices = [
        _root(f"{number}", [1, 2, 3, 9], [number], request="10", choice=number - 10)
        for number in range(10, 40)
    ]
    again = _root("50", [1, 2, 3, 9], [5])
    assert set(breaks_of([a, *choices]).values()) == {Break("00", 3, 4)}
    assert breaks_of([a, choices[0], again])["50"] == Break("00", 3, 4)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_model.folder)


def test_lanes_of_a_session(tiny_model: TinyModel, tokenizer: ChatTokenizer) -> None:
    small = small_session(tiny_model)
    turns = small.recorded.turns
    spelled = drift_lane(turns, [small.first, small.other_choice, small.aborted], "", tokenizer)
    assert (spelled.basis, spelled.reason) == (Basis.TEMPLATE, "")
    assert spelled.first is not None and spelled.first >= small.first.prompt_tokens
    assert Change.SAME_TEXT in {hunk[3] for hunk in spelled.hunks}
    first = drift_lane(turns, [small.first], "", tokenizer)
    assert (first.first, first.hunks) == (None, [])
    broken = drift_lane(turns, [small.broken], "", tokenizer)
    assert broken.basis == Basis.BEFORE
    found = breaks_of(turns)[small.broken.id]
    assert (broken.first, broken.other) == (found.equal, found.total)


def test_stripped_thinking_is_left_out(tiny_model: TinyModel) -> None:
    strips = CHATML.replace("message.content }}", "(message.content.split('</think>') | last) }}")
    assert strips != CHATML
    stripping = ChatTokenizer.load(tiny_model.folder, strips)
    question = [{"role": "user", "content": "a"}]
    prompt = stripping.render(question)
    thought = [*stripping.encode("<think>so</think>b"), 2]
    answer = {"role": "assistant", "content": "<think>so</think>b"}
    after = stripping.append(
        prompt + thought, [{"role": "user", "content": "c"}], history=[*question, answer]
    )
    one = root(
        "1", prompt, thought, messages=json.dumps(question).encode(), message=json.dumps(answer).encode()
    )
    appended = after.prompt_ids[len(prompt + thought) :]
    two = child("2", one, list(appended), [5], messages=b'[{"role": "user", "content": "c"}]')
    lane = drift_lane([one, two], [one, two], "", stripping)
    assert (lane.first, lane.reason) == (len(prompt), "")
    assert [hunk[3] for hunk in lane.hunks] == [Change.LEFT_OUT]


def test_what_cannot_be_rendered_says_why(tokenizer: ChatTokenizer) -> None:
    for messages, reason in [
        (b"broken", "cannot be read"),
        (b"[]", "not recorded"),
        (b'[{"role": "nobody", "content": "x"}]', "does not render"),
    ]:
        turn = root("a", [1], [2], messages=messages)
        assert reason in drift_lane([turn], [turn], "", tokenizer).reason
