"""In which sample a turn that several share is trained."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.trees import child, root
from tokenproxy.record.turn import Turn
from tokenproxy.samples.samples import Selection, samples_of


def _fork(**changes: Any) -> list[Turn]:
    """Turn "a", continued by "b", "c" and "d" of equal length.

    `changes` hold the fields of turns by name. `after` names the turn that one continues instead of "a".
    """
    turns = {"a": root("a", [1], [2])}
    for name in sorted({"b", "c", "d", *changes}):
        fields = {"after": "a", "appended": [3], "sampled": [4, 5], **changes.get(name, {})}
        parent, appended, sampled = (fields.pop(field) for field in ("after", "appended", "sampled"))
        turns[name] = child(name, turns[parent], appended, sampled, **fields)
    return list(turns.values())


def _trained(turns: Sequence[Turn], rewards: dict[str, float]) -> dict[str, str]:
    """For each turn the leaf of the sample that trains it."""
    samples = samples_of(turns, rewards).samples
    return {span.id: sample.leaf for sample in samples for span in sample.turns if span.trained}


_LONG: dict[str, Any] = {"sampled": [4, 5, 6]}
_ABORTED: dict[str, Any] = {"finish_reason": "abort"}


def _cut(after: str) -> dict[str, Any]:
    """A turn that cannot be trained on, so that the path before it is not whole."""
    return {"after": after, "problem": "media"}


@pytest.mark.parametrize(
    ("changes", "rewards", "trains"),
    [
        ({}, {}, "b"),  # of equal leaves the oldest
        ({"d": _LONG}, {}, "d"),
        ({"d": {"appended": [3, 3]}}, {}, "d"),  # appended ids count as length
        ({"b": _LONG, "e": _cut("b")}, {}, "c"),  # a whole leaf before a longer cut one
        ({"d": _LONG}, {"c": 0.0}, "c"),  # a rewarded leaf before a longer one
        ({"e": _cut("c")}, {"c": 0.0}, "c"),  # and before a whole one
        ({}, {"c": 0.0, "d": 1.0}, "c"),  # its value does not matter
        ({}, {"": 1.0, "a": 1.0}, "b"),  # rewards that all leaves share prefer none
        ({"b": _ABORTED, "c": {**_LONG, **_ABORTED}}, {"b": 1.0}, "d"),
        ({"b": _ABORTED, "c": _ABORTED, "d": _ABORTED}, {"d": 1.0}, "d"),
        ({"b": _ABORTED, "e": {"after": "b"}}, {}, "e"),  # aborted in the middle of a path
        ({"b": {"logprobs": b""}}, {}, "c"),  # a refused leaf trains nothing
    ],
)
def test_the_leaf_that_trains_a_shared_turn(
    changes: dict[str, Any], rewards: dict[str, float], trains: str
) -> None:
    assert _trained(_fork(**changes), rewards)["a"] == trains


def test_each_shared_turn_is_assigned_among_the_leaves_that_hold_it() -> None:
    d, e, f = {"after": "b"}, {"after": "b", **_ABORTED}, {"after": "c"}
    trained = _trained(_fork(d=d, e=e, f=f), {"f": 1.0})
    assert trained == dict(zip("abcdef", "fdfdef", strict=True))


def test_masks_of_a_fork() -> None:
    turns = _fork(c={"appended": [3, 3]})
    once, each = samples_of(turns, {}).samples, samples_of(turns, {}, selection=Selection("each")).samples
    assert [(sample.leaf, sample.index) for sample in once] == [("b", 0), ("c", 1), ("d", 2)]
    assert [sample.loss_mask for sample in once] == [[0, 0, 1, 1], [1, 0, 0, 1, 1], [0, 0, 1, 1]]
    assert [sample.loss_mask for sample in each] == [[1, 0, 1, 1], [1, 0, 0, 1, 1], [1, 0, 1, 1]]
    assert once[0].logprobs == [-0.125, None, -0.125, -0.25]


def test_choices_share_only_their_prompt_and_the_turns_before_it() -> None:
    first = root("a", [1, 2], [3], request="q")
    second = root("b", [1, 2], [4], request="q", choice=1, prompt_turn="a", messages=first.messages)
    samples = samples_of([first, second], {}).samples
    found = [(sample.prompt_ids, sample.completion_ids, sample.loss_mask) for sample in samples]
    assert found == [([1, 2], [3], [1]), ([1, 2], [4], [1])]
    assert [sample.messages and sample.messages[0]["content"] for sample in samples] == ["to a", "to a"]
