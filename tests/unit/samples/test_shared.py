"""In which sample a turn that several share is trained."""

from collections.abc import Sequence
from typing import Any

from proxy.history.turn import Turn
from proxy.samples.samples import samples_of
from tests.support.trees import child, root


def _trained(turns: Sequence[Turn], rewards: dict[str, float] | None = None) -> dict[str, str]:
    """For each turn the leaf of the sample that trains it."""
    samples = samples_of(turns, rewards or {}).samples
    return {span.id: sample.leaf for sample in samples for span in sample.turns if span.trained}


def _fork() -> list[Turn]:
    a = root("a", [1], [2, 3])
    return [a, child("b", a, [4], [5]), child("c", a, [4], [6, 7]), child("d", a, [8], [9])]


def test_a_shared_turn_is_trained_once() -> None:
    samples = samples_of(_fork(), {}).samples
    assert [sample.leaf for sample in samples] == ["b", "c", "d"]
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert [sample.loss_mask for sample in samples] == [[0, 0, 0, 1], [1, 1, 0, 1, 1], [0, 0, 0, 1]]
    assert samples[0].logprobs == [-0.125, -0.25, None, -0.125]
    assert [[span.trained for span in sample.turns] for sample in samples] == [
        [False, True],
        [True, True],
        [False, True],
    ]


def _three(**fields: dict[str, Any]) -> list[Turn]:
    """A fork of "a" into "b", "c" and "d" of equal length; fields are given by turn."""
    a = root("a", [1], [2])
    return [a, *(child(name, a, [3], [4, 5], **fields.get(name, {})) for name in "bcd")]


def test_of_equal_leaves_the_oldest_trains_shared_turns() -> None:
    assert _trained(_three())["a"] == "b"


def test_the_longest_leaf_trains_shared_turns() -> None:
    a, b, c, _ = _three()
    assert _trained([a, b, c, child("d", a, [3], [4, 5, 6])])["a"] == "d"
    assert _trained([a, b, child("c", a, [3, 3], [4, 5]), child("d", b, [3], [4])])["a"] == "d"


def test_appended_ids_count_as_length() -> None:
    a, b, c, _ = _three()
    assert _trained([a, b, c, child("d", a, [3, 3], [4, 5])])["a"] == "d"


def test_a_whole_leaf_trains_shared_turns_before_a_longer_cut_one() -> None:
    a, b, _, _ = _three()
    longer = child("c", b, [6], [7])
    refused = child("d", longer, [8], [9], problem="media")
    turns = [a, b, longer, refused, child("e", a, [3], [4])]
    assert _trained(turns) == {"a": "e", "e": "e", "b": "c", "c": "c"}


def test_a_rewarded_leaf_trains_shared_turns_before_longer_and_whole_ones() -> None:
    a, b, c, d = _three()
    assert _trained([a, b, c, d], {"c": 0.0})["a"] == "c"
    assert _trained([a, b, c, child("d", a, [3], [4, 5, 6])], {"c": 0.0})["a"] == "c"
    cut = child("e", c, [6], [7], problem="media")
    assert _trained([a, b, c, d, cut], {"c": 0.0})["a"] == "c"
    assert _trained([a, b, c, d], {"c": 0.0, "d": 1.0})["a"] == "c"


def test_the_rewards_of_rollout_and_shared_turns_prefer_no_leaf() -> None:
    assert _trained(_three(), {"": 1.0, "a": 1.0})["a"] == "b"


def test_a_leaf_with_its_own_reward_comes_before_those_with_the_rollouts() -> None:
    assert _trained(_three(), {"": 1.0, "d": 0.0})["a"] == "d"


def test_an_aborted_leaf_trains_no_turn_that_another_leaf_holds() -> None:
    a, b, _, d = _three(b={"finish_reason": "abort"})
    longer = child("c", a, [3], [4, 5, 6], finish_reason="abort")
    assert _trained([a, b, longer, d], {"b": 1.0})["a"] == "d"
    cut = child("e", d, [6], [7], problem="media")
    assert _trained([a, b, longer, d, cut], {"b": 1.0})["a"] == "d"


def test_of_aborted_leaves_alone_the_best_trains_shared_turns() -> None:
    aborted = {name: {"finish_reason": "abort"} for name in "bcd"}
    assert _trained(_three(**aborted))["a"] == "b"
    assert _trained(_three(**aborted), {"d": 1.0})["a"] == "d"


def test_a_turn_aborted_in_the_middle_of_a_path_does_not_matter() -> None:
    a, b, c, _ = _three(b={"finish_reason": "abort"})
    assert _trained([a, b, c, child("d", b, [6], [7])])["a"] == "d"


def test_each_shared_turn_is_assigned_among_the_leaves_that_hold_it() -> None:
    a = root("a", [1], [2])
    b, c = child("b", a, [3], [4]), child("c", a, [3], [4])
    d, e = child("d", b, [5], [6]), child("e", b, [5], [6], finish_reason="abort")
    f = child("f", c, [5], [6])
    assert _trained([a, b, c, d, e, f], {"f": 1.0}) == dict(zip("abcdef", "fdfdef", strict=True))


def test_a_shared_turn_is_trained_in_each() -> None:
    samples = samples_of(_fork(), {}, shared="each").samples
    assert [sample.loss_mask for sample in samples] == [[1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 1, 0, 1]]


def test_a_refused_leaf_trains_no_shared_turns() -> None:
    a, _, c, d = _fork()
    bad = child("b", a, [4], [5], logprobs=b"")
    found = samples_of([a, bad, c, d], {})
    assert [(sample.leaf, sample.loss_mask) for sample in found.samples] == [
        ("c", [1, 1, 0, 1, 1]),
        ("d", [0, 0, 0, 1]),
    ]
    assert [(refused.leaf, refused.reason) for refused in found.refused] == [("b", "no_logprobs")]


def test_choices_of_a_first_request_share_only_their_prompt() -> None:
    first = root("a", [1, 2], [3], request="q")
    second = root("b", [1, 2], [4], request="q", choice=1, prompt_turn="a", messages=first.messages)
    samples = samples_of([first, second], {}).samples
    assert [(sample.prompt_ids, sample.completion_ids, sample.loss_mask) for sample in samples] == [
        ([1, 2], [3], [1]),
        ([1, 2], [4], [1]),
    ]
    assert [sample.messages and sample.messages[0]["content"] for sample in samples] == ["to a", "to a"]


def test_choices_of_a_later_request_share_the_turns_before_it() -> None:
    a = root("a", [1], [2])
    choices = [
        child(name, a, [3], [4 + i], request="q", choice=i, prompt_turn="b" if i else None)
        for i, name in enumerate("bcd")
    ]
    samples = samples_of([a, *choices], {}).samples
    assert [(sample.completion_ids, sample.loss_mask) for sample in samples] == [
        ([2, 3, 4], [1, 0, 1]),
        ([2, 3, 5], [0, 0, 1]),
        ([2, 3, 6], [0, 0, 1]),
    ]
