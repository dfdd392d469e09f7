"""Turns that cannot be trained on, and stored values that cannot be read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.trees import child, root
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn, pack_logprobs
from tokenproxy.record.vocabulary import Problem
from tokenproxy.samples.samples import samples_of

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()


def _refusals(turns: Sequence[Turn]) -> list[tuple[str, str, str]]:
    return [(refused.leaf, refused.turn, refused.reason) for refused in samples_of(turns, {}).refused]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"problem": Problem.MEDIA}, "media"),
        ({"logprobs": b""}, "no_logprobs"),
        ({"logprobs": pack_logprobs([-1.0, -1.0, -1.0])}, "logprobs_mismatch"),
        ({"logprobs": pack_logprobs([-1.0, float("nan")])}, "logprobs_not_finite"),
        ({"completion": b"", "logprobs": b""}, "no_completion_ids"),
        ({"prompt_tokens": 5}, "prompt_length_mismatch"),
        ({"parent": "lost"}, "missing_parent"),
        ({"appended": b"\4\0\0"}, "unreadable_evidence"),
        ({"logprobs": b"\0" * 6}, "unreadable_evidence"),
    ],
)
def test_untrainable_turns_are_refused(fields: dict[str, Any], reason: str) -> None:
    a = root("a", [1, 2], [3])
    bad = child("b", a, [4], [5, 6], **fields)
    assert _refusals([a, bad]) == [("b", "b", reason)]
    assert [sample.leaf for sample in samples_of([a, bad], {}).samples] == ["a"]


def test_first_turns_without_their_prompt_are_refused() -> None:
    assert _refusals([root("a", [], [1])]) == [("a", "a", "no_prompt_ids")]
    choice = root("b", [], [4], request="q", choice=1, prompt_turn="a", prompt_tokens=2)
    assert _refusals([root("a", [1, 2], [3], request="q"), choice]) == [("b", "b", "prompt_length_mismatch")]


def test_turns_that_continue_each_other_are_refused() -> None:
    """Only a corrupt store holds such turns."""
    a, b = root("a", [1], [2], parent="b"), root("b", [1], [2], parent="a")
    found = samples_of([a, b, child("c", b, [3], [4]), root("e", [1], [2])], {})
    assert [sample.leaf for sample in found.samples] == ["e"]
    assert {refused.reason for refused in found.refused} == {"missing_parent"}


def test_the_first_untrainable_turn_of_a_path_is_named() -> None:
    a = root("a", [1], [2], problem="usage_mismatch")
    turns = [a, child("b", a, [3], [4], problem="media"), child("c", a, [3], [5])]
    assert _refusals(turns) == [("b", "a", "usage_mismatch"), ("c", "a", "usage_mismatch")]
    assert _refusals(turns[::-1]) == _refusals(turns)
    assert _refusals([child("d", turns[2], [5], [6]), turns[2]]) == [("d", "c", "missing_parent")]


def test_the_beginning_of_a_refused_path_is_delivered_unless_another_sample_holds_it() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    bad = child("c", b, [5], [6], problem="media")
    found = samples_of([a, b, bad, child("d", bad, [7], [8])], {"": 1.0, "d": 9.0})
    [sample] = found.samples
    assert (sample.leaf, sample.whole, sample.completion_ids) == ("b", False, [2, 3, 4])
    assert (sample.loss_mask, sample.reward) == ([1, 0, 1], 1.0)
    assert [(refused.leaf, refused.turn) for refused in found.refused] == [("d", "c")]
    found = samples_of([a, b, child("c", a, [5], [6], problem="media")], {})
    assert [sample.leaf for sample in found.samples] == ["b"]


@pytest.mark.parametrize("stored", [b"", b"{", b"7", b'"\xff"', b"[" * 100_000])
def test_json_that_cannot_be_read_is_null(stored: bytes) -> None:
    a = root("a", [1], [2])
    other = stored or b"{"  # nothing stored means: none, or as in the turn before
    fields = {"tools": other, "template_kwargs": other}
    session = Session(id="r", created=1.0, used=1.0, metadata=other)
    b = child("b", a, [3], [4], messages=stored, **fields)
    [sample] = samples_of([a, b], {}, session=session).samples
    assert (sample.messages, sample.completion_ids, sample.loss_mask) == (None, [2, 3, 4], [1, 0, 1])
    assert (sample.tools, sample.template_kwargs, sample.metadata) == (None, None, None)
    assert samples_of([root("a", [1], [2], message=stored)], {}).samples[0].messages is None


def test_problems_are_documented() -> None:
    undocumented = [problem for problem in Problem if f"| `{problem}` | {problem.meaning}" not in _DOCS]
    assert undocumented == []
