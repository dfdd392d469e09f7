"""Turns that cannot be trained on, and stored values that cannot be read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.history.store import Session
from proxy.history.turn import Turn, pack_logprobs
from proxy.history.vocabulary import Problem
from proxy.samples.samples import Sample, samples_of
from tests.support.trees import child, root

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()


def _refusals(turns: Sequence[Turn]) -> list[tuple[str, str, str]]:
    return [(refused.leaf, refused.turn, refused.reason) for refused in samples_of(turns, {}).refused]


def test_a_choice_whose_prompt_the_store_did_not_fill_in_is_refused() -> None:
    first = root("a", [1, 2], [3], request="q")
    second = root("b", [], [4], request="q", choice=1, prompt_turn="a", prompt_tokens=2)
    assert _refusals([first, second]) == [("b", "b", "prompt_length_mismatch")]


@pytest.mark.parametrize(
    "fields, reason",
    [
        *(({"problem": problem}, problem) for problem in Problem),
        ({"logprobs": b""}, "no_logprobs"),
        ({"logprobs": pack_logprobs([-1.0])}, "logprobs_mismatch"),
        ({"logprobs": pack_logprobs([-1.0, -1.0, -1.0])}, "logprobs_mismatch"),
        ({"logprobs": pack_logprobs([-1.0, float("nan")])}, "logprobs_not_finite"),
        ({"logprobs": pack_logprobs([-1.0, float("-inf")])}, "logprobs_not_finite"),
        ({"completion": b"", "logprobs": b""}, "no_completion_ids"),
        ({"prompt_tokens": 5}, "prompt_length_mismatch"),
        ({"prompt_tokens": 3}, "prompt_length_mismatch"),
        ({"logprobs": pack_logprobs([float("inf"), -1.0])}, "logprobs_not_finite"),
        ({"parent": "lost"}, "missing_parent"),
        ({"appended": b"\4\0\0"}, "unreadable_evidence"),
        ({"completion": b"\5\0\0\0\6"}, "unreadable_evidence"),
        ({"logprobs": b"\0" * 6}, "unreadable_evidence"),
        ({"completion": b"\5" * 7, "logprobs": b"\0" * 7}, "unreadable_evidence"),
    ],
)
def test_untrainable_turns_are_refused(fields: dict[str, Any], reason: str) -> None:
    a = root("a", [1, 2], [3])
    bad = child("b", a, [4], [5, 6], **fields)
    assert _refusals([a, bad]) == [("b", "b", reason)]
    assert reason in list(Problem)
    assert [sample.leaf for sample in samples_of([a, bad], {}).samples] == ["a"]


@pytest.mark.parametrize("name", "ab")
def test_a_turn_that_continues_itself_is_refused(name: str) -> None:
    turns = [root("a", [1], [2]), root(name, [1], [2], parent=name)]
    assert _refusals(turns) == [(name, name, "missing_parent")]


def test_turns_that_continue_each_other_are_refused() -> None:
    b = root("b", [1], [2], parent="d")
    c = child("c", b, [3], [4])
    d = child("d", c, [5], [6])
    a = child("a", d, [7], [8])
    whole = root("e", [1], [2])
    for turns in ([b, c, d, whole], [d, whole, c, b]):
        assert _refusals(turns) == [("d", "b", "missing_parent")]
        assert [sample.leaf for sample in samples_of(turns, {}).samples] == ["e"]
    assert [leaf for leaf, _, _ in _refusals([a, b, c, d])] == ["a", "d"]


def test_a_turn_without_any_prompt_is_refused() -> None:
    assert _refusals([root("a", [], [1])]) == [("a", "a", "no_prompt_ids")]


def test_the_first_untrainable_turn_of_a_path_is_named() -> None:
    a = root("a", [1], [2], problem="usage_mismatch")
    turns = [a, child("b", a, [3], [4], problem="media"), child("c", a, [3], [5])]
    assert _refusals(turns) == [("b", "a", "usage_mismatch"), ("c", "a", "usage_mismatch")]
    assert _refusals(turns[::-1]) == _refusals(turns)


def test_a_missing_first_turn_refuses_the_turns_after_it() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    found = samples_of([b, child("c", b, [5], [6])], {})
    assert found.samples == []
    assert [(refused.leaf, refused.turn) for refused in found.refused] == [("c", "b")]


def test_the_beginning_of_a_refused_path_is_delivered() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    bad = child("c", b, [5], [6], problem="media")
    found = samples_of([a, b, bad, child("d", bad, [7], [8])], {"": 1.0, "d": 9.0})
    [sample] = found.samples
    assert (sample.leaf, sample.whole, sample.completion_ids) == ("b", False, [2, 3, 4])
    assert (sample.loss_mask, sample.reward) == ([1, 0, 1], 1.0)
    assert [(refused.leaf, refused.turn) for refused in found.refused] == [("d", "c")]


def test_whole_samples_come_before_cut_ones() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    turns = [a, b, child("c", b, [5], [6], problem="media"), child("d", a, [7], [8])]
    samples = samples_of(turns, {}).samples
    assert [(s.leaf, s.whole, s.loss_mask) for s in samples] == [
        ("d", True, [1, 0, 1]),
        ("b", False, [0, 0, 1]),
    ]


def test_a_beginning_that_another_sample_holds_is_not_delivered_again() -> None:
    a = root("a", [1], [2])
    turns = [a, child("b", a, [3], [4]), *(child(n, a, [5], [6], problem="media") for n in "cd")]
    found = samples_of(turns, {})
    assert [sample.leaf for sample in found.samples] == ["b"]
    assert [refused.leaf for refused in found.refused] == ["c", "d"]


_UNREADABLE = [b"", b"{", b"7", b"null", b'"\xff"', b"[" * 100_000]


@pytest.mark.parametrize("stored", [*_UNREADABLE, b"{}"])
def test_messages_that_cannot_be_read_are_null(stored: bytes) -> None:
    a = root("a", [1], [2])
    [sample] = samples_of([a, child("b", a, [3], [4], messages=stored)], {}).samples
    assert (sample.messages, sample.completion_ids, sample.loss_mask) == (None, [2, 3, 4], [1, 0, 1])


@pytest.mark.parametrize("stored", [*_UNREADABLE, b"[]"])
def test_an_answer_that_cannot_be_read_makes_messages_null(stored: bytes) -> None:
    [sample] = samples_of([root("a", [1], [2], message=stored)], {}).samples
    assert sample.messages is None


@pytest.mark.parametrize("stored", _UNREADABLE[1:])
def test_other_json_that_cannot_be_read_is_null(stored: bytes) -> None:
    a = root("a", [1], [2], tools=stored, template_kwargs=stored)
    session = Session(id="r", created=1.0, used=1.0, metadata=stored)
    [sample] = samples_of([a], {}, session=session).samples
    assert (sample.tools, sample.template_kwargs, sample.metadata) == (None, None, None)
    assert sample.loss_mask == [1]


@pytest.mark.parametrize("value", [1.5, True, ["stop"], {"a": 1}, b"stop", object()])
def test_odd_values_next_to_the_evidence_are_null(value: Any) -> None:
    a = root("a", [1], [2], stop_reason=value, routed_experts=value, finish_reason=value)
    [sample] = samples_of([a], {}).samples
    [span] = sample.turns
    assert (span.stop_reason, span.routed_experts, span.finish_reason) == (None, None, None)
    assert (sample.finish_reason, sample.loss_mask) == (None, [1])
    assert msgspec.json.decode(msgspec.json.encode(sample), type=Sample) == sample


def test_routed_experts_are_exported_unchecked() -> None:
    [sample] = samples_of([root("a", [1], [2], routed_experts="no base64!")], {}).samples
    assert sample.turns[0].routed_experts == "no base64!"


@pytest.mark.parametrize("problem", Problem)
def test_problems_are_documented(problem: Problem) -> None:
    assert f"| `{problem}` | {problem.meaning}" in _DOCS
