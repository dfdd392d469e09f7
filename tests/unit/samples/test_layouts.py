"""Each layout against its trainer's own fields, written out here as the trainer documents them."""

from pathlib import Path

import msgspec
import pytest

from proxy.history.store import Session
from proxy.history.turn import WeightSpan
from proxy.samples.layouts import LAYOUTS
from proxy.samples.samples import Sample, samples_of
from tests.support.trees import child, root

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()


_TRAINERS: dict[str, str] = {
    # RolloutFunc; "any extra fields (per-completion) are forwarded to the reward functions"
    "trl": "prompt_ids completion_ids logprobs env_mask reward rollout leaf finish_reason",
    # AgentLoopOutput
    "verl": "prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics "
    "extra_fields",
    # TrainingSample, and the trace's reward
    "prime-rl": "token_ids mask logprobs temperatures env_name trace_id branch_index reward",
    # GeneratorOutput: one entry of each of its lists
    "skyrl": "prompt_token_ids response_ids rewards loss_masks stop_reasons rollout_logprobs env_metrics",
}
_FIELDS = {"plain": list(Sample.__struct_fields__), **{name: _TRAINERS[name].split() for name in _TRAINERS}}


@pytest.fixture(params=[{}, {"": 1.0, "b": 0.5, "c": 0.25}])
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    """Two branches that share a turn; one ended with a tool call."""
    a = root("a", [1, 2], [3, 4], tools=b'[{"name": "f"}]', weight_versions=(WeightSpan("v1", 0, 2),))
    b = child("b", a, [5], [6, 7], finish_reason="tool_calls", weight_versions=(WeightSpan("v2", 0, 2),))
    c = child("c", a, [8], [9], finish_reason="length")
    session = Session(id="t/r", tenant="t", created=1.0, used=1.0, metadata=b'{"env_name": "wordle"}')
    return samples_of([a, b, c], request.param, session=session).samples


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_and_types(name: str, samples: list[Sample]) -> None:
    kinds = LAYOUTS[name].columns
    table = _DOCS.partition("## Layouts")[2]
    assert [field for field in kinds if f"`{field}`" not in table] == []
    for sample in samples:
        row = LAYOUTS[name].row(sample)
        assert list(row) == _FIELDS[name] == list(kinds)
        encoded = msgspec.json.encode(row)
        if name == "plain":
            assert msgspec.json.decode(encoded, type=Sample) == sample
        else:
            assert msgspec.json.decode(encoded) == row


@pytest.mark.parametrize(
    "name, ids, mask, logprobs",
    [
        ("plain", "completion_ids", "loss_mask", "logprobs"),
        ("trl", "completion_ids", "env_mask", "logprobs"),
        ("verl", "response_ids", "response_mask", "response_logprobs"),
        ("prime-rl", "token_ids", "mask", "logprobs"),
        ("skyrl", "response_ids", "loss_masks", "rollout_logprobs"),
    ],
)
def test_ids_masks_and_log_probabilities(
    name: str, ids: str, mask: str, logprobs: str, samples: list[Sample]
) -> None:
    prompt = [1, 2] if name == "prime-rl" else []
    blank = [0.0] * len(prompt)
    unsampled = None if name == "plain" else 0.0
    first, second = (LAYOUTS[name].row(sample) for sample in samples)  # the longer one trains "a"
    assert first[ids] == [*prompt, 3, 4, 5, 6, 7]
    assert first[mask] == [*[0] * len(prompt), 1, 1, 0, 1, 1]
    assert first[logprobs] == [*blank, -0.125, -0.25, unsampled, -0.125, -0.25]
    assert second[ids] == [*prompt, 3, 4, 8, 9]
    assert second[mask] == [*[0] * len(prompt), 0, 0, 0, 1]
    assert second[logprobs] == [*blank, -0.125, -0.25, unsampled, -0.125]


def test_fields_that_only_some_layouts_have() -> None:
    a = root("a", [1], [2])
    stated = {"request_class": "main", "agent": "a2", "parent_agent": "a1"}
    versions = (WeightSpan("v", 0, 1),)
    b = child("b", a, [3], [4], finish_reason="tool_calls", weight_versions=versions, **stated)
    session = Session(id="t/r", tenant="t", created=1.0, used=1.0, metadata=b'{"env_name": "wordle"}')
    [sample] = samples_of([a, b], {"": 1.0, "a": 0.0}, session=session).samples
    verl, prime, skyrl = (LAYOUTS[name].row(sample) for name in ("verl", "prime-rl", "skyrl"))
    origin = {
        **{"rollout": "r", "tenant": "t", "leaf": "b", "whole": True, "model": "m", **stated},
        "request_classes": ["", "main"],
        "finish_reason": "tool_calls",
        "weight_versions": [["v", 2, 3]],
    }
    assert (verl["num_turns"], verl["reward_score"], verl["metrics"]) == (4, 1.0, {})
    assert verl["extra_fields"] == {"turn_scores": [0.0], **origin}
    assert (prime["env_name"], prime["trace_id"], prime["branch_index"]) == ("wordle", "r", 0)
    assert (prime["temperatures"], prime["reward"]) == ([], 1.0)
    assert (skyrl["stop_reasons"], skyrl["rewards"], skyrl["env_metrics"]) == ("stop", 1.0, origin)


def test_stop_reasons_of_skyrl() -> None:
    shown = {}
    for finish_reason in ("stop", "tool_calls", "length", "abort", None):
        [sample] = samples_of([root("a", [1], [2], finish_reason=finish_reason)], {}).samples
        shown[finish_reason] = LAYOUTS["skyrl"].row(sample)["stop_reasons"]
    assert shown == {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "abort", None: None}
