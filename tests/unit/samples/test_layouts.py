"""Each layout against its trainer's own fields, written out here as the trainer documents them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.trees import child, root
from tokenproxy.record.store import Session
from tokenproxy.record.turn import WeightSpan
from tokenproxy.samples.layouts import LAYOUTS
from tokenproxy.samples.samples import Sample, samples_of

_DOCS = (Path(__file__).parents[3] / "docs" / "samples.md").read_text()
_ORIGIN = {
    **{"rollout": "r", "tenant": "t", "leaf": "b", "whole": True, "model": "m"},
    **{"request_class": "main", "request_classes": ["", "main"], "agent": "a2", "parent_agent": "a1"},
    **{"continues": "", "segment": 0, "turns_after_finish": 1},
    **{"finish_reason": "tool_calls", "weight_versions": [["v1", 0, 2], ["v2", 3, 5]]},
}
_TO_A, _FROM_A, _TO_B, _FROM_B = (
    {"role": role, "content": f"{word} {name}"}
    for name in "ab"
    for role, word in (("user", "to"), ("assistant", "from"))
)
_LOGPROBS = [-0.125, -0.25, 0.0, -0.125, -0.25]
_ROWS: dict[str, dict[str, Any]] = {
    # RolloutFunc; "any extra fields (per-completion) are forwarded to the reward functions"
    "trl": {
        **{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6, 7], "logprobs": _LOGPROBS},
        **{"env_mask": [1, 1, 0, 1, 1], "reward": 0.5, "rollout": "r", "leaf": "b"},
        **{"finish_reason": "tool_calls", "turns_after_finish": 1},
    },
    # AgentLoopOutput
    "verl": {
        **{"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6, 7], "response_mask": [1, 1, 0, 1, 1]},
        **{"response_logprobs": _LOGPROBS, "reward_score": 0.5, "num_turns": 4, "metrics": {}},
        **{"extra_fields": {"turn_scores": [0.5], **_ORIGIN}},
    },
    # TrainingSample, and the trace's reward
    "prime-rl": {
        **{"token_ids": [1, 2, 3, 4, 5, 6, 7], "mask": [False, False, True, True, False, True, True]},
        **{"logprobs": [0.0, 0.0, *_LOGPROBS], "temperatures": [], "env_name": "wordle"},
        **{"trace_id": "r", "branch_index": 0, "reward": 0.5},
    },
    # GeneratorOutput: one entry of each of its lists
    "skyrl": {
        **{"prompt_token_ids": [1, 2], "response_ids": [3, 4, 5, 6, 7], "rewards": 0.5},
        **{"loss_masks": [1, 1, 0, 1, 1], "stop_reasons": "stop", "rollout_logprobs": _LOGPROBS},
        **{"env_metrics": _ORIGIN},
    },
    # TrainingTrace
    "openenv": {
        "schema_version": 1,
        "turns": [
            {
                **{"node_id": "a", "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4]},
                **{"per_token_logps": [-0.125, -0.25], "loss_mask": [0, 0, 1, 1]},
                "request": {"messages": [_TO_A], "tools": None},
                "response": {"choices": [{"message": _FROM_A, "finish_reason": "stop"}]},
                "metadata": {**_ORIGIN, "node_id": "a", "reward": 0.5, "temperature": None},
            },
            {
                **{"node_id": "b", "prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6, 7]},
                **{"per_token_logps": [-0.125, -0.25], "loss_mask": [0, 0, 0, 0, 0, 1, 1]},
                "request": {"messages": [_TO_A, _FROM_A, _TO_B], "tools": None},
                "response": {"choices": [{"message": _FROM_B, "finish_reason": "tool_calls"}]},
                "metadata": {**_ORIGIN, "node_id": "b", "reward": 0.5, "temperature": None},
            },
        ],
    },
    # Trajectory
    "atif": {
        **{"schema_version": "ATIF-v1.8", "session_id": "r", "trajectory_id": "b"},
        "agent": {"name": "unknown", "version": "7", "model_name": "m", "tool_definitions": None},
        "steps": [
            {"step_id": 1, "source": "user", "message": "to a"},
            {
                **{"step_id": 2, "source": "agent", "message": "from a", "tool_calls": None},
                **{"reasoning_content": None, "is_copied_context": False, "llm_call_count": 1},
                "metrics": {
                    **{"prompt_tokens": 2, "completion_tokens": 2, "prompt_token_ids": [1, 2]},
                    **{"completion_token_ids": [3, 4], "logprobs": [-0.125, -0.25]},
                    "extra": {"turn": "a", "finish_reason": "stop", "reward": None},
                },
            },
            {"step_id": 3, "source": "user", "message": "to b"},
            {
                **{"step_id": 4, "source": "agent", "message": "from b", "tool_calls": None},
                **{"reasoning_content": None, "is_copied_context": False, "llm_call_count": 1},
                "metrics": {
                    **{"prompt_tokens": 5, "completion_tokens": 2, "prompt_token_ids": [1, 2, 3, 4, 5]},
                    **{"completion_token_ids": [6, 7], "logprobs": [-0.125, -0.25]},
                    "extra": {"turn": "b", "finish_reason": "tool_calls", "reward": 0.5},
                },
            },
        ],
        "extra": {"reward": 0.5, **_ORIGIN},
    },
}


@pytest.fixture
def sample() -> Sample:
    """Two turns; the last one ended with a tool call."""
    a = root("a", [1, 2], [3, 4], weight_versions=(WeightSpan("v1", 0, 2),))
    stated = {"request_class": "main", "agent": "a2", "parent_agent": "a1", "finish_reason": "tool_calls"}
    late = {"weight_versions": (WeightSpan("v2", 0, 2),), "after_finish": True}
    b = child("b", a, [5], [6, 7], **late, **stated)
    session = Session(
        id="t/r", tenant="t", created=1.0, used=1.0, metadata=b'{"env_name": "wordle", "agent_version": 7}'
    )
    [sample] = samples_of([a, b], {"": 1.0, "b": 0.5}, session=session).samples
    return sample


@pytest.mark.parametrize("name", _ROWS)
def test_rows_of_trainers(name: str, sample: Sample) -> None:
    row = LAYOUTS[name].row(sample)
    assert row == _ROWS[name] and list(row) == list(_ROWS[name])
    assert msgspec.json.decode(msgspec.json.encode(row)) == row


def test_the_plain_layout_is_the_whole_sample(sample: Sample) -> None:
    row = LAYOUTS["plain"].row(sample)
    assert list(row) == list(Sample.__struct_fields__)
    assert msgspec.json.decode(msgspec.json.encode(row), type=Sample) == sample


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_are_documented(name: str) -> None:
    table = _DOCS.partition("## Layouts")[2]
    assert [field for field in LAYOUTS[name].columns if f"`{field}`" not in table] == []


def _message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_turns_and_steps_have_calls_results_and_the_mask_of_their_sample() -> None:
    """Results stand in the step that called; what ATIF cannot hold is in `extra`; context is marked."""
    calls = [
        {"id": f"c{arguments[:1]}", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": 1}', "[1")
    ]
    image = {"type": "image_url", "image_url": {"url": "image:0"}}
    asked = [
        *(
            _message("developer", "be brief"),
            _message("user", "earlier"),
            _message("assistant", "not sampled"),
        ),
        _message("user", [{"type": "text", "text": "look"}, image]),
    ]
    answer = _message("assistant", None, reasoning="hm", tool_calls=calls)
    results = [_message("tool", "one", tool_call_id="c{"), _message("tool", "two", tool_call_id="edited")]
    a = root("a", [1], [2], messages=json.dumps(asked).encode(), message=json.dumps(answer).encode())
    b = child("b", a, [3], [4], messages=json.dumps(results).encode())
    first, other = samples_of([a, b, child("c", a, [5], [6, 7])], {}).samples
    steps = LAYOUTS["atif"].row(first)["steps"]
    assert [(step["source"], step["message"], step.get("is_copied_context")) for step in steps] == [
        *(("system", "be brief", None), ("user", "earlier", None), ("agent", "not sampled", True)),
        ("user", [{"type": "text", "text": "look"}], None),
        *(("agent", "", True), ("agent", "from b", False)),
    ]
    assert [turn["loss_mask"] for turn in LAYOUTS["openenv"].row(first)["turns"]] == [[0, 0], [0, 0, 0, 1]]
    assert steps[3]["extra"] == {"content": asked[3]["content"]}
    assert steps[4]["reasoning_content"] == "hm"
    assert [(call["arguments"], call.get("extra")) for call in steps[4]["tool_calls"]] == [
        ({"x": 1}, None),
        ({}, {"arguments": "[1"}),
    ]
    assert steps[4]["observation"]["results"] == [
        {"source_call_id": "c{", "content": "one"},
        {"source_call_id": None, "content": "two"},
    ]
    assert [step["is_copied_context"] for step in LAYOUTS["atif"].row(other)["steps"][4::2]] == [False, False]


@pytest.mark.parametrize("name", ["openenv", "atif"])
def test_ids_are_exported_without_their_messages_if_these_cannot_be_read(name: str, sample: Sample) -> None:
    spans = [msgspec.structs.replace(span, message_index=None) for span in sample.turns]
    row = LAYOUTS[name].row(msgspec.structs.replace(sample, messages=None, turns=spans))
    if name == "openenv":
        assert [(turn["request"], turn["response"]) for turn in row["turns"]] == [({}, {})] * 2
    else:
        ids = [step["metrics"]["completion_token_ids"] for step in row["steps"]]
        assert (ids, {step["message"] for step in row["steps"]}) == ([[3, 4], [6, 7]], {""})


def test_stop_reasons_of_skyrl(sample: Sample) -> None:
    for finish_reason in ("stop", "length", "abort", None):
        changed = msgspec.structs.replace(sample, finish_reason=finish_reason)
        assert LAYOUTS["skyrl"].row(changed)["stop_reasons"] == finish_reason
