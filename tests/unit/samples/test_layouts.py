"""Each layout against its trainer's own fields, written out here as the trainer documents them."""

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
    **{"continues": "", "segment": 0},
    **{"finish_reason": "tool_calls", "weight_versions": [["v1", 0, 2], ["v2", 3, 5]]},
}
_LOGPROBS = [-0.125, -0.25, 0.0, -0.125, -0.25]
_ROWS: dict[str, dict[str, Any]] = {
    # RolloutFunc; "any extra fields (per-completion) are forwarded to the reward functions"
    "trl": {
        **{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5, 6, 7], "logprobs": _LOGPROBS},
        **{"env_mask": [1, 1, 0, 1, 1], "reward": 0.5, "rollout": "r", "leaf": "b"},
        **{"finish_reason": "tool_calls"},
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
}


@pytest.fixture
def sample() -> Sample:
    """Two turns; the last one ended with a tool call."""
    a = root("a", [1, 2], [3, 4], weight_versions=(WeightSpan("v1", 0, 2),))
    stated = {"request_class": "main", "agent": "a2", "parent_agent": "a1", "finish_reason": "tool_calls"}
    b = child("b", a, [5], [6, 7], weight_versions=(WeightSpan("v2", 0, 2),), **stated)
    session = Session(id="t/r", tenant="t", created=1.0, used=1.0, metadata=b'{"env_name": "wordle"}')
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


def test_stop_reasons_of_skyrl(sample: Sample) -> None:
    for finish_reason in ("stop", "length", "abort", None):
        changed = msgspec.structs.replace(sample, finish_reason=finish_reason)
        assert LAYOUTS["skyrl"].row(changed)["stop_reasons"] == finish_reason
