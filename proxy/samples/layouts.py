"""Rows of training samples in the field names of trainers: for each trainer a function from sample to row.

A row holds only the fields of the trainer's own type, unless the function's docstring names others. All
per-token lists of a row have the length of its ids. For trainers that need a number for ids that were not
sampled, the log-probability is 0.0, as they write it themselves: their mask excludes these positions. Only
the plain layout distinguishes "not sampled" (null) from a log-probability of 0.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from proxy.samples.samples import Sample

Row = dict[str, Any]

Kind = Literal["ids", "mask", "flags", "floats", "text", "integer", "number", "flag", "json"]
"""The type of a column. Lists: token ids (ids), 0 and 1 (mask), booleans (flags), floats or null (floats).
Single values: string or null (text), integer, float or null (number), boolean (flag). Or any JSON (json)."""

_ENGINE_STOP = frozenset({"tool_calls", "function_call"})
"""Finish reasons of OpenAI routes for turns that the engine itself ended with `stop`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become rows."""

    columns: Mapping[str, Kind]
    """Every field of a row, in order."""
    row: Callable[[Sample], Row]


def plain(sample: Sample) -> Row:
    """The fields of `proxy.samples.samples.Sample`, all of them."""
    nested = {name: msgspec.to_builtins(getattr(sample, name)) for name in ("turns", "images")}
    return {**msgspec.structs.asdict(sample), **nested}


def trl(sample: Sample) -> Row:
    """One completion of what a `rollout_func` of TRL's GRPOTrainer returns.

    The function returns a dict of lists: collect the rows column by column. TRL requires `prompt_ids`,
    `completion_ids` and `logprobs`; `env_mask` is 1 on ids to train on, and `logprobs` 0.0 on ids that were
    not sampled. The other fields reach the reward functions as arguments of the same name: a reward function
    that returns `reward` trains on the recorded rewards (None means "cannot be scored" there too).

    Source: trl 1.16.0, trl/trainer/grpo_trainer.py: `RolloutFunc`, `GRPOTrainer._generate`.
    """
    return {
        "prompt_ids": sample.prompt_ids,
        "completion_ids": sample.completion_ids,
        "logprobs": _or_zero(sample),
        "env_mask": sample.loss_mask,
        "reward": sample.reward,
        "rollout": sample.rollout,
        "leaf": sample.leaf,
        "finish_reason": sample.finish_reason,
    }


def verl(sample: Sample) -> Row:
    """The arguments of verl's `AgentLoopOutput`: `AgentLoopOutput(**row)`.

    `response_logprobs` is 0.0 where nothing was sampled. `num_turns` counts, as verl does, the prompt, each
    turn of the model and the messages between them. In `extra_fields`, `turn_scores` holds the rewards of
    those turns that have one; the other entries identify the sample.

    Source: verl 0.9.1, verl/experimental/agent_loop/agent_loop.py: `AgentLoopOutput`;
    verl/experimental/agent_loop/tool_agent_loop.py: `num_turns`, `turn_scores`.
    """
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.completion_ids,
        "response_mask": sample.loss_mask,
        "response_logprobs": _or_zero(sample),
        "reward_score": sample.reward,
        "num_turns": 2 * len(sample.turns),
        "metrics": {},
        "extra_fields": {
            "turn_scores": [turn.reward for turn in sample.turns if turn.reward is not None],
            **_origin(sample),
        },
    }


def prime_rl(sample: Sample) -> Row:
    """The arguments of prime-rl's `TrainingSample`, and the trace's reward.

    prime-rl does not separate prompt and completion: `token_ids` is the whole sequence, `mask` is true on ids
    to train on, `logprobs` 0.0 on ids that were not sampled. `temperatures` is empty, as prime-rl's own
    `trace_to_samples` leaves it: the orchestrator fills it in. The orchestrator also computes `advantages`
    from the reward, which is not a field of the struct: `reward = row.pop("reward")`. `env_name` is taken
    from the session's metadata.

    Source: prime-rl, src/prime_rl/transport/types.py: `TrainingSample`;
    src/prime_rl/orchestrator/trajectories.py: `trace_to_samples`; src/prime_rl/orchestrator/train_sink.py;
    verifiers, verifiers/v1/trace.py: `Branch.logprobs`.
    """
    prompt = len(sample.prompt_ids)
    return {
        "token_ids": sample.prompt_ids + sample.completion_ids,
        "mask": [False] * prompt + [bool(trained) for trained in sample.loss_mask],
        "logprobs": [0.0] * prompt + _or_zero(sample),
        "temperatures": [],
        "env_name": str((sample.metadata or {}).get("env_name", "")),
        "trace_id": sample.rollout,
        "branch_index": sample.index,
        "reward": sample.reward,
    }


def skyrl(sample: Sample) -> Row:
    """One entry of each list of SkyRL's `GeneratorOutput`.

    That type holds a batch as a dict of lists: collect the rows column by column. `rollout_logprobs` is 0.0
    where nothing was sampled. `stop_reasons` are the engine's own: a turn that ended with tool calls has
    `stop`, because SkyRL treats every other value as truncated. `env_metrics` identifies the sample.

    Source: skyrl 0.3.0, skyrl/train/generators/base.py: `GeneratorOutput`;
    skyrl/train/utils/trainer_utils.py: `validate_generator_output`.
    """
    stop_reason = "stop" if sample.finish_reason in _ENGINE_STOP else sample.finish_reason
    return {
        "prompt_token_ids": sample.prompt_ids,
        "response_ids": sample.completion_ids,
        "rewards": sample.reward,
        "loss_masks": sample.loss_mask,
        "stop_reasons": stop_reason,
        "rollout_logprobs": _or_zero(sample),
        "env_metrics": _origin(sample),
    }


def _or_zero(sample: Sample) -> list[float]:
    """Log-probabilities, with 0.0 for ids that were not sampled."""
    return [0.0 if logprob is None else logprob for logprob in sample.logprobs]


def _origin(sample: Sample) -> Row:
    """The fields that identify a sample. Every row has the same keys, as batches require."""
    return {
        "rollout": sample.rollout,
        "tenant": sample.tenant,
        "leaf": sample.leaf,
        "whole": sample.whole,
        "model": sample.model,
        "request_class": sample.request_class,
        "request_classes": [turn.request_class for turn in sample.turns],
        "agent": sample.agent,
        "parent_agent": sample.parent_agent,
        "finish_reason": sample.finish_reason,
        "weight_versions": [
            msgspec.to_builtins(span) for turn in sample.turns for span in turn.weight_versions
        ],
    }


LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout(
        {
            "rollout": "text",
            "tenant": "text",
            "leaf": "text",
            "index": "integer",
            "whole": "flag",
            "session": "flag",
            "ambiguous": "flag",
            "model": "text",
            "prompt_ids": "ids",
            "completion_ids": "ids",
            "loss_mask": "mask",
            "logprobs": "floats",
            "logprobs_mode": "text",
            "turns": "json",
            "finish_reason": "text",
            "reward": "number",
            "messages": "json",
            "tools": "json",
            "template_kwargs": "json",
            "metadata": "json",
            "images": "json",
            "image_data": "json",
            "revision": "integer",
            "request_class": "text",
            "agent": "text",
            "parent_agent": "text",
        },
        plain,
    ),
    "trl": Layout(
        {
            "prompt_ids": "ids",
            "completion_ids": "ids",
            "logprobs": "floats",
            "env_mask": "mask",
            "reward": "number",
            "rollout": "text",
            "leaf": "text",
            "finish_reason": "text",
        },
        trl,
    ),
    "verl": Layout(
        {
            "prompt_ids": "ids",
            "response_ids": "ids",
            "response_mask": "mask",
            "response_logprobs": "floats",
            "reward_score": "number",
            "num_turns": "integer",
            "metrics": "json",
            "extra_fields": "json",
        },
        verl,
    ),
    "prime-rl": Layout(
        {
            "token_ids": "ids",
            "mask": "flags",
            "logprobs": "floats",
            "temperatures": "floats",
            "env_name": "text",
            "trace_id": "text",
            "branch_index": "integer",
            "reward": "number",
        },
        prime_rl,
    ),
    "skyrl": Layout(
        {
            "prompt_token_ids": "ids",
            "response_ids": "ids",
            "rewards": "number",
            "loss_masks": "mask",
            "stop_reasons": "text",
            "rollout_logprobs": "floats",
            "env_metrics": "json",
        },
        skyrl,
    ),
}
"""Every layout by its name on the command line."""
