import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from proxy.history.evidence import PROBLEMS
from proxy.history.store import Session
from proxy.history.turn import Turn, WeightSpan, pack_logprobs, unpack_ids
from proxy.samples.samples import Sample, samples_of
from tests.samples.trees import child, root

_DOCS = Path(__file__).parents[2] / "docs" / "samples.md"


def _whole(turn: Turn, turns: dict[str, Turn]) -> list[int]:
    """Prompt and completion of a turn, straight from the records."""
    before = _whole(turns[turn.parent], turns) if turn.parent else []
    return before + unpack_ids(turn.appended) + unpack_ids(turn.completion)


def _refusals(turns: Sequence[Turn]) -> list[tuple[str, str, str]]:
    return [(refused.leaf, refused.turn, refused.reason) for refused in samples_of(turns, {}).refused]


def _trained(samples: Sequence[Sample]) -> list[str]:
    return [turn.id for sample in samples for turn in sample.turns if turn.trained]


def test_one_conversation_is_one_sample() -> None:
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


def test_nothing_gives_nothing() -> None:
    found = samples_of([], {"": 1.0})
    assert (found.samples, found.refused) == ([], [])


def test_what_a_turn_says_of_itself_arrives() -> None:
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
    )
    [sample] = samples_of([a, b], {"b": 2.0}).samples
    first, second = sample.turns
    assert first.weight_versions == [WeightSpan("v1", 0, 2)]
    assert second.weight_versions == [WeightSpan("v1", 4, 5), WeightSpan("v2", 5, 6)]
    assert (second.source, second.reason, second.stop_reason) == ("rendered", "tools_changed", 7)
    assert second.temperature == 1.5
    assert (first.routed_experts, second.routed_experts) == (None, "bnB5")
    assert (first.reward, second.reward) == (None, 2.0)


def _fork() -> list[Turn]:
    a = root("a", [1], [2, 3])
    return [a, child("b", a, [4], [5]), child("c", a, [4], [6, 7]), child("d", a, [8], [9])]


def test_a_shared_turn_is_trained_once() -> None:
    samples = samples_of(_fork(), {}).samples
    assert [sample.leaf for sample in samples] == ["b", "c", "d"]
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert [sample.loss_mask for sample in samples] == [[1, 1, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1]]
    assert samples[1].logprobs == [-0.125, -0.25, None, -0.125, -0.25]
    assert sorted(_trained(samples)) == ["a", "b", "c", "d"]


def test_a_shared_turn_is_trained_in_each() -> None:
    samples = samples_of(_fork(), {}, shared="each").samples
    assert [sample.loss_mask for sample in samples] == [[1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 1, 0, 1]]


def test_the_refused_do_not_take_what_others_share() -> None:
    a, _, c, d = _fork()
    bad = child("b", a, [4], [5], logprobs=b"")
    found = samples_of([a, bad, c, d], {})
    assert [(sample.leaf, sample.loss_mask) for sample in found.samples] == [
        ("c", [1, 1, 0, 1, 1]),
        ("d", [0, 0, 0, 1]),
    ]
    assert [(refused.leaf, refused.reason) for refused in found.refused] == [("b", "no_logprobs")]


def test_choices_of_a_first_request_share_only_their_prompt() -> None:
    turns = [root(name, [1, 2], [3 + i], request="q", choice=i) for i, name in enumerate("ab")]
    assert [(s.prompt_ids, s.completion_ids, s.loss_mask) for s in samples_of(turns, {}).samples] == [
        ([1, 2], [3], [1]),
        ([1, 2], [4], [1]),
    ]


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ({}, {"b": None, "c": None}),
        ({"": 1.0}, {"b": 1.0, "c": 1.0}),
        ({"": 1.0, "c": 0.0}, {"b": 1.0, "c": 0.0}),
        ({"a": 5.0}, {"b": None, "c": None}),
    ],
)
def test_rewards(rewards: dict[str, float], expected: dict[str, float | None]) -> None:
    a, b, c, _ = _fork()
    samples = samples_of([a, b, c], rewards).samples
    assert {sample.leaf: sample.reward for sample in samples} == expected
    assert {turn.reward for sample in samples for turn in sample.turns if turn.id == "a"} == {
        rewards.get("a")
    }


@pytest.mark.parametrize(
    "fields, reason",
    [
        *(({"problem": problem}, problem) for problem in PROBLEMS),
        ({"logprobs": b""}, "no_logprobs"),
        ({"logprobs": pack_logprobs([-1.0])}, "logprobs_mismatch"),
        ({"logprobs": pack_logprobs([-1.0, -1.0, -1.0])}, "logprobs_mismatch"),
        ({"logprobs": pack_logprobs([-1.0, float("nan")])}, "logprobs_not_finite"),
        ({"logprobs": pack_logprobs([-1.0, float("-inf")])}, "logprobs_not_finite"),
        ({"completion": b"", "logprobs": b""}, "no_completion_ids"),
        ({"prompt_tokens": 5}, "prompt_length_mismatch"),
        ({"prompt_tokens": 3}, "prompt_length_mismatch"),
        ({"parent": "lost"}, "missing_parent"),
    ],
)
def test_what_does_not_add_up_is_refused(fields: dict[str, Any], reason: str) -> None:
    a = root("a", [1, 2], [3])
    bad = child("b", a, [4], [5, 6], **fields)
    assert _refusals([a, bad]) == [("b", "b", reason)]
    assert reason in PROBLEMS


def test_a_turn_without_any_prompt_is_refused() -> None:
    assert _refusals([root("a", [], [1])]) == [("a", "a", "no_prompt_ids")]


def test_the_first_fault_of_a_path_is_named() -> None:
    a = root("a", [1], [2], problem="usage_mismatch")
    turns = [a, child("b", a, [3], [4], problem="media"), child("c", a, [3], [5])]
    assert _refusals(turns) == [("b", "a", "usage_mismatch"), ("c", "a", "usage_mismatch")]
    assert _refusals(turns[::-1]) == _refusals(turns)


def test_a_lost_first_turn_refuses_what_continues_it() -> None:
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


def test_whole_paths_train_before_cut_ones() -> None:
    a = root("a", [1], [2])
    b = child("b", a, [3], [4])
    turns = [a, b, child("c", b, [5], [6], problem="media"), child("d", a, [7], [8])]
    samples = samples_of(turns, {}).samples
    assert [(s.leaf, s.whole, s.loss_mask) for s in samples] == [
        ("d", True, [1, 0, 1]),
        ("b", False, [0, 0, 1]),
    ]


def test_a_beginning_that_others_hold_is_not_delivered_again() -> None:
    a = root("a", [1], [2])
    turns = [a, child("b", a, [3], [4]), *(child(n, a, [5], [6], problem="media") for n in "cd")]
    found = samples_of(turns, {})
    assert [sample.leaf for sample in found.samples] == ["b"]
    assert [refused.leaf for refused in found.refused] == ["c", "d"]


def test_an_aborted_turn_is_delivered_as_far_as_it_came() -> None:
    a = root("a", [1], [2])
    [sample] = samples_of([a, child("b", a, [3], [4], finish_reason="abort")], {}).samples
    assert (sample.completion_ids, sample.loss_mask) == ([2, 3, 4], [1, 0, 1])
    assert (sample.finish_reason, sample.turns[-1].finish_reason) == ("abort", "abort")


def test_messages_tools_and_words_about_the_rollout() -> None:
    a = root("a", [1], [2], tools=b'[{"name": "old"}]', template_kwargs=b'{"think": true}', model="base")
    b = child("b", a, [3], [4], tools=b'[{"name": "new"}]', model="lora")
    c = child("c", b, [5], [6], model="lora")
    session = Session(id="r", created=1.0, used=1.0, metadata=b'{"task": 7}')
    [sample] = samples_of([a, b, c], {}, session=session).samples
    assert [message["content"] for message in sample.messages] == [
        "to a",
        "from a",
        "to b",
        "from b",
        "to c",
        "from c",
    ]
    assert (sample.tools, sample.template_kwargs) == ([{"name": "new"}], {"think": True})
    assert (sample.model, sample.metadata, sample.session) == ("lora", {"task": 7}, True)


@pytest.mark.parametrize("session", [None, Session(id="r", explicit=False, created=1.0, used=1.0)])
def test_a_conversation_that_nobody_named(session: Session | None) -> None:
    [sample] = samples_of([root("a", [1], [2])], {}, session=session).samples
    assert (sample.session, sample.metadata, sample.tools, sample.template_kwargs) == (False, {}, [], {})


def _random_tree(seed: int) -> list[Turn]:
    """Forks of all kinds; one turn in six has a problem; ids do not tell which came first."""
    rng = random.Random(seed)
    names = rng.sample(range(100), 20)
    turns: list[Turn] = []
    for name in names:
        ids = [rng.randrange(9) for _ in range(rng.randint(2, 6))]
        cut = rng.randint(1, len(ids) - 1)
        problem = "usage_mismatch" if rng.random() < 1 / 6 else ""
        if turns and rng.random() < 0.85:
            turns.append(child(f"{name:02}", rng.choice(turns), ids[:cut], ids[cut:], problem=problem))
        else:
            turns.append(root(f"{name:02}", ids[:cut], ids[cut:], problem=problem))
    rng.shuffle(turns)
    return turns


@pytest.mark.parametrize("shared", ["once", "each"])
@pytest.mark.parametrize("seed", range(30))
def test_the_law(seed: int, shared: Literal["once", "each"]) -> None:
    turns = _random_tree(seed)
    by_id = {turn.id: turn for turn in turns}
    found = samples_of(turns, {}, shared=shared)

    def sound(turn: Turn) -> bool:
        return not turn.problem and (turn.parent is None or sound(by_id[turn.parent]))

    for sample in found.samples:
        assert sample.prompt_ids + sample.completion_ids == _whole(by_id[sample.leaf], by_id)
        assert len(sample.completion_ids) == len(sample.loss_mask) == len(sample.logprobs)
        sampled = {i for turn in sample.turns for i in range(turn.start, turn.end)}
        assert {i for i, logprob in enumerate(sample.logprobs) if logprob is not None} == sampled
        trained = {i for turn in sample.turns if turn.trained for i in range(turn.start, turn.end)}
        assert {i for i, bit in enumerate(sample.loss_mask) if bit} == trained
        assert sample.turns[-1].trained
    delivered = {turn.id for sample in found.samples for turn in sample.turns}
    assert delivered == {turn.id for turn in turns if sound(turn)}
    if shared == "once":
        assert sorted(_trained(found.samples)) == sorted(delivered)
    leaves = {turn.id for turn in turns} - {turn.parent for turn in turns}
    whole = {sample.leaf for sample in found.samples if sample.whole}
    assert whole | {refused.leaf for refused in found.refused} == leaves
    assert not whole & {refused.leaf for refused in found.refused}


def test_a_deep_conversation_takes_no_recursion_and_linear_time() -> None:
    def seconds(count: int) -> float:
        turns = [root("000000", [1], [2])]
        for i in range(1, count):
            turns.append(child(f"{i:06}", turns[-1], [1] * 20, [2] * 20))
        began = time.perf_counter()
        [sample] = samples_of(turns, {}).samples
        assert len(sample.turns) == count
        return time.perf_counter() - began

    fastest = min(seconds(1000) for _ in range(3))
    assert min(seconds(4000) for _ in range(3)) < 12 * fastest


@pytest.mark.parametrize("word", PROBLEMS)
def test_every_reason_is_documented(word: str) -> None:
    assert f"| `{word}` |" in _DOCS.read_text()


@pytest.mark.parametrize("word", Sample.__struct_fields__)
def test_every_field_is_documented(word: str) -> None:
    assert f"| `{word}` |" in _DOCS.read_text()
