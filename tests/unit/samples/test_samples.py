import time
from pathlib import Path
from typing import Any

import pytest

from proxy.history.store import Session
from proxy.history.turn import WeightSpan, pack_ids
from proxy.samples.samples import Sample, TurnSpan, samples_of
from tests.support.trees import child, root

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()


def test_a_conversation_without_forks_is_a_single_sample() -> None:
    a = root("a", [1, 2, 3], [4, 5])
    b = child("b", a, [6], [7, 8, 9], finish_reason="length")
    found = samples_of([b, a], {})
    assert found.refused == []
    [sample] = found.samples
    assert sample.prompt_ids == [1, 2, 3]
    assert sample.completion_ids == [4, 5, 6, 7, 8, 9]
    assert sample.loss_mask == [1, 1, 0, 1, 1, 1]
    assert sample.logprobs == [-0.125, -0.25, None, -0.125, -0.25, -0.375]
    assert [(turn.id, turn.start, turn.end) for turn in sample.turns] == [("a", 0, 2), ("b", 3, 6)]
    assert [(turn.source, turn.finish_reason) for turn in sample.turns] == [
        ("rendered", "stop"),
        ("extended", "length"),
    ]
    assert (sample.rollout, sample.leaf, sample.index, sample.whole) == ("r", "b", 0, True)
    assert (sample.finish_reason, sample.model, sample.reward) == ("length", "m", None)


def test_no_turns_give_no_samples() -> None:
    found = samples_of([], {"": 1.0})
    assert (found.samples, found.refused) == ([], [])


def test_spans_hold_the_fields_of_their_turns() -> None:
    a = root("a", [1], [2, 3], weight_versions=(WeightSpan("v1", 0, 2),))
    b = child(
        "b",
        a,
        [4, 5],
        [6, 7],
        weight_versions=(WeightSpan("v1", 0, 1), WeightSpan("v2", 1, 2)),
        reason="tools_changed",
        source="rendered",
        stop_reason=7,
        temperature=1.5,
        routed_experts="bnB5",
        routed_experts_start=3,
        sampling_mask=(pack_ids([2, 1]), pack_ids([6, 8, 7])),
        request_class="main",
    )
    [sample] = samples_of([a, b], {"b": 2.0}).samples
    first, second = sample.turns
    assert first.weight_versions == [WeightSpan("v1", 0, 2)]
    assert second.weight_versions == [WeightSpan("v1", 4, 5), WeightSpan("v2", 5, 6)]
    assert (second.source, second.reason, second.stop_reason) == ("rendered", "tools_changed", 7)
    assert second.temperature == 1.5
    assert (first.routed_experts, second.routed_experts) == (None, "bnB5")
    assert (first.routed_experts_start, second.routed_experts_start) == (0, 3)
    assert (first.sampling_mask, second.sampling_mask) == (None, [[6, 8], [7]])
    assert (first.request_class, second.request_class) == ("", "main")
    assert (first.reward, second.reward) == (None, 2.0)


@pytest.mark.parametrize(
    "counts, kept",
    [([2], [6, 8]), ([2, 1], [6]), ([2, 1], [6, 8, 7, 9]), ([-1, 1], []), ([], [])],
)
def test_a_mask_whose_lengths_do_not_agree_is_left_out(counts: list[int], kept: list[int]) -> None:
    a = root("a", [1], [2, 3], sampling_mask=(pack_ids(counts), pack_ids(kept)))
    [sample] = samples_of([a], {}).samples
    assert sample.turns[0].sampling_mask is None


def test_a_mask_that_cannot_be_unpacked_is_left_out() -> None:
    a = root("a", [1], [2], sampling_mask=(b"\x01\x00\x00", b""))
    [sample] = samples_of([a], {}).samples
    assert sample.turns[0].sampling_mask is None


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ({}, {"b": None, "c": None}),
        ({"": 1.0}, {"b": 1.0, "c": 1.0}),
        ({"": 1.0, "c": 0.0}, {"b": 1.0, "c": 0.0}),
        ({"a": 5.0}, {"b": None, "c": None}),
        ({"": 1.0, "c": float("nan")}, {"b": 1.0, "c": 1.0}),
        ({"": float("inf")}, {"b": None, "c": None}),
    ],
)
def test_rewards(rewards: dict[str, float], expected: dict[str, float | None]) -> None:
    a = root("a", [1], [2, 3])
    samples = samples_of([a, child("b", a, [4], [5]), child("c", a, [4], [6])], rewards).samples
    assert {sample.leaf: sample.reward for sample in samples} == expected
    assert {turn.reward for sample in samples for turn in sample.turns if turn.id == "a"} == {
        rewards.get("a")
    }


def test_an_aborted_turn_is_delivered_with_the_ids_sampled_until_then() -> None:
    a = root("a", [1], [2])
    [sample] = samples_of([a, child("b", a, [3], [4], finish_reason="abort")], {}).samples
    assert (sample.completion_ids, sample.loss_mask) == ([2, 3, 4], [1, 0, 1])
    assert (sample.finish_reason, sample.turns[-1].finish_reason) == ("abort", "abort")


def _session(**fields: Any) -> Session:
    return Session(**{"id": "r", "created": 1.0, "used": 1.0, **fields})


def test_messages_of_the_whole_path() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    [sample] = samples_of([a, b], {}).samples
    assert sample.messages is not None
    assert [message["content"] for message in sample.messages] == ["to a", "from a", "to b", "from b"]


@pytest.mark.parametrize(
    "first, second, third, expected",
    [
        (b'[{"name": "f"}]', None, None, [{"name": "f"}]),
        (b'[{"name": "f"}]', b'[{"name": "g"}]', None, [{"name": "g"}]),
        (b'[{"name": "f"}]', b"", None, []),
        (b'[{"name": "f"}]', None, b"", []),
        (b"", None, b'[{"name": "g"}]', [{"name": "g"}]),
        (b"", b"", b"", []),
        (None, None, None, []),
    ],
)
def test_tools_and_template_arguments_are_those_of_the_last_request(
    first: bytes | None, second: bytes | None, third: bytes | None, expected: list[Any]
) -> None:
    def arguments(tools: bytes | None) -> bytes | None:
        return b'{"tools": ' + tools + b"}" if tools else tools

    a = root("a", [1], [2], tools=first, template_kwargs=arguments(first))
    b = child("b", a, [3], [4], tools=second, template_kwargs=arguments(second))
    c = child("c", b, [5], [6], tools=third, template_kwargs=arguments(third))
    [sample] = samples_of([a, b, c], {}).samples
    assert sample.tools == expected
    assert sample.template_kwargs == ({"tools": expected} if expected else {})


def test_tools_of_other_branches_do_not_count() -> None:
    a = root("a", [1], [2], tools=b'[{"name": "f"}]')
    turns = [a, child("b", a, [3], [4], tools=b""), child("c", a, [3], [4])]
    assert [sample.tools for sample in samples_of(turns, {}).samples] == [[], [{"name": "f"}]]


def test_the_model_is_that_of_the_last_turn() -> None:
    a = root("a", [1], [2], model="base")
    [sample] = samples_of([a, child("b", a, [3], [4], model="lora")], {}).samples
    assert sample.model == "lora"


@pytest.mark.parametrize(
    "first, second, of_sample",
    [
        ("raw_logprobs", "raw_logprobs", "raw_logprobs"),
        ("processed_logprobs", "processed_logprobs", "processed_logprobs"),
        ("raw_logprobs", "processed_logprobs", ""),
        ("raw_logprobs", "", ""),
        ("", "", ""),
    ],
)
def test_the_logprobs_mode_of_turns_and_sample(first: str, second: str, of_sample: str) -> None:
    a = root("a", [1], [2], logprobs_mode=first)
    [sample] = samples_of([a, child("b", a, [3], [4], logprobs_mode=second)], {}).samples
    assert [span.logprobs_mode for span in sample.turns] == [first, second]
    assert sample.logprobs_mode == of_sample


def test_fields_of_the_session() -> None:
    session = _session(id="4f2a/r", tenant="4f2a", ambiguous=True, metadata=b'{"task": 7}')
    a = root("a", [1], [2], rollout="4f2a/r")
    bad = root("b", [1], [2], rollout="4f2a/r", problem="media")
    found = samples_of([a, bad], {}, session=session)
    [sample] = found.samples
    assert (sample.rollout, sample.tenant, sample.session) == ("r", "4f2a", True)
    assert (sample.ambiguous, sample.metadata) == (True, {"task": 7})
    assert [refused.rollout for refused in found.refused] == ["r"]


@pytest.mark.parametrize("session", [None, _session(explicit=False)])
def test_a_conversation_without_a_session(session: Session | None) -> None:
    [sample] = samples_of([root("a", [1], [2])], {}, session=session).samples
    assert (sample.rollout, sample.tenant, sample.session) == ("r", "", False)
    assert (sample.ambiguous, sample.metadata) == (False, {})


def test_a_deep_conversation_takes_no_recursion_and_linear_time() -> None:
    def seconds(count: int) -> float:
        turns = [root("000000", [1], [2])]
        for i in range(1, count):
            turns.append(child(f"{i:06}", turns[-1], [1] * 20, [2] * 20))
        began = time.process_time()
        [sample] = samples_of(turns, {}).samples
        assert len(sample.turns) == count
        return time.process_time() - began

    fastest = min(seconds(1000) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 12 * fastest


@pytest.mark.parametrize("field", Sample.__struct_fields__)
def test_fields_of_samples_are_documented(field: str) -> None:
    assert f"| `{field}` |" in _DOCS


@pytest.mark.parametrize("field", TurnSpan.__struct_fields__)
def test_fields_of_turns_are_documented(field: str) -> None:
    table = _DOCS.partition("Each entry of `turns`")[2].partition("##")[0]
    assert f"`{field}`" in "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("|"))
