import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.trees import child, root
from tokenproxy.record.store import Session
from tokenproxy.record.turn import WeightSpan, pack_ids
from tokenproxy.samples.samples import Sample, TellingSpan, samples_of

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()


def test_a_conversation_without_forks_is_a_single_sample() -> None:
    a = root("a", [1, 2, 3], [4, 5])
    found = samples_of([child("b", a, [6], [7, 8, 9], finish_reason="length"), a], {})
    assert found.refused == []
    [sample] = found.samples
    assert [message["content"] for message in sample.messages or []] == ["to a", "from a", "to b", "from b"]
    assert [turn.source for turn in sample.turns] == ["rendered", "extended"]
    assert (sample.rollout, sample.leaf, sample.index, sample.whole) == ("r", "b", 0, True)
    assert (sample.finish_reason, sample.model, sample.reward) == ("length", "m", None)


def test_spans_hold_the_fields_of_their_turns() -> None:
    a = root("a", [1], [2, 3], weight_versions=(WeightSpan("v1", 0, 2),))
    fields = {"source": "rendered", "reason": "tools_changed", "stop_reason": 7, "temperature": 1.5}
    experts = {"routed_experts": "no base64!", "routed_experts_start": 3}  # exported unchecked
    versions = (WeightSpan("v1", 0, 1), WeightSpan("v2", 1, 2))
    mask = (pack_ids([2, 1]), pack_ids([6, 8, 7]))
    b = child("b", a, [4, 5], [6, 7], weight_versions=versions, sampling_mask=mask, **fields, **experts)
    [sample] = samples_of([a, b], {"b": 2.0}).samples
    first, second = sample.turns
    assert first.weight_versions == [WeightSpan("v1", 0, 2)]
    assert second.weight_versions == [WeightSpan("v1", 4, 5), WeightSpan("v2", 5, 6)]
    assert (second.source, second.reason, second.stop_reason) == ("rendered", "tools_changed", 7)
    assert second.temperature == 1.5
    facts = [(span["routed_experts"], span["sampling_mask"]) for span in msgspec.to_builtins(sample.turns)]
    assert facts == [(None, None), ("no base64!", [[6, 8], [7]])]
    assert (first.routed_experts_start, second.routed_experts_start) == (0, 3)
    assert (first.reward, second.reward) == (None, 2.0)


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ({}, {"b": None, "c": None}),
        ({"": 1.0}, {"b": 1.0, "c": 1.0}),
        ({"": 1.0, "c": 0.0}, {"b": 1.0, "c": 0.0}),
        ({"a": 5.0}, {"b": None, "c": None}),
        ({"": 1.0, "c": float("nan")}, {"b": 1.0, "c": 1.0}),
    ],
)
def test_rewards(rewards: dict[str, float], expected: dict[str, float | None]) -> None:
    a = root("a", [1], [2, 3])
    samples = samples_of([a, child("b", a, [4], [5]), child("c", a, [4], [6])], rewards).samples
    assert {sample.leaf: sample.reward for sample in samples} == expected
    assert {turn.reward for sample in samples for turn in sample.turns if turn.id == "a"} == {
        rewards.get("a")
    }


@pytest.mark.parametrize(
    ("first", "second", "third", "expected"),
    [
        (b'[{"name": "f"}]', None, None, [{"name": "f"}]),
        (b'[{"name": "f"}]', b'[{"name": "g"}]', None, [{"name": "g"}]),
        (b'[{"name": "f"}]', None, b"", []),
        (b"", None, b'[{"name": "g"}]', [{"name": "g"}]),
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


@pytest.mark.parametrize(
    ("first", "second", "of_sample"), [("raw", "raw", "raw"), ("raw", "processed", ""), ("raw", "", "")]
)
def test_the_model_is_that_of_the_last_turn_and_the_logprobs_mode_that_of_all(
    first: str, second: str, of_sample: str
) -> None:
    a = root("a", [1], [2], model="base", logprobs_mode=first)
    [sample] = samples_of([a, child("b", a, [3], [4], model="lora", logprobs_mode=second)], {}).samples
    assert [span.logprobs_mode for span in sample.turns] == [first, second]
    assert (sample.model, sample.logprobs_mode) == ("lora", of_sample)


def test_fields_of_the_session() -> None:
    fields: dict[str, Any] = {"tenant": "4f2a", "ambiguous": True, "metadata": b'{"task": 7}'}
    session = Session(id="4f2a/r", created=1.0, used=1.0, **fields)
    turns = [root("a", [1], [2], rollout="4f2a/r"), root("b", [1], [2], rollout="4f2a/r", problem="media")]
    found = samples_of(turns, {}, session=session)
    [sample] = found.samples
    assert (sample.rollout, sample.tenant, sample.session) == ("r", "4f2a", True)
    assert (sample.ambiguous, sample.metadata) == (True, {"task": 7})
    assert [refused.rollout for refused in found.refused] == ["r"]
    [sample] = samples_of([root("a", [1], [2])], {}).samples
    assert (sample.rollout, sample.tenant, sample.session, sample.metadata) == ("r", "", False, {})


def test_the_work_is_linear_in_the_length_of_a_conversation_and_needs_no_recursion() -> None:
    def calls(count: int) -> int:
        """How many functions are called for a conversation of so many turns."""
        turns = [root("0000", [1], [2])]
        for number in range(1, count):
            turns.append(child(f"{number:04}", turns[-1], [1], [2]))
        counted: list[str] = []
        sys.setprofile(lambda frame, event, argument: counted.append(event))
        try:
            assert len(samples_of(turns, {}).samples) == 1
        finally:
            sys.setprofile(None)
        return len(counted)

    assert calls(1200) < 5 * calls(300)


def test_fields_are_documented() -> None:
    assert [field for field in Sample.__struct_fields__ if f"| `{field}` |" not in _DOCS] == []
    table = _DOCS.partition("Each entry of `turns`")[2].partition("##")[0]
    names = "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("|"))
    assert [field for field in TellingSpan.__struct_fields__ if f"`{field}`" not in names] == []
