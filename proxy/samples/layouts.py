"""Rows of training samples as trainers name them: one function from a sample to a row for each project.

A row holds the fields of that project's own type and nothing more, unless its docstring says so. All arrays
of a row that run along tokens are aligned with the ids. Trainers that want a number where nothing was sampled
get 0.0 there, as they write it themselves: their mask leaves those positions out. Only the plain layout tells
"no log-probability" (null) from one of 0.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from proxy.samples.samples import Sample

Row = dict[str, Any]

Kind = Literal["ids", "mask", "flags", "floats", "text", "integer", "number", "flag", "json"]
"""What a column holds: lists of token ids, of 0 and 1, of booleans, of floats (or null); one string, integer,
float (or null), boolean; or anything else that is JSON."""

_ENGINE_STOP = frozenset({"tool_calls", "function_call"})
"""What an OpenAI route calls a turn that the engine itself ended with `stop`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become rows."""

    columns: Mapping[str, Kind]
    """Every field of a row, in order."""
    row: Callable[[Sample], Row]


def plain(sample: Sample) -> Row:
    """All that is known: the fields of `proxy.samples.samples.Sample`."""
    return {**msgspec.structs.asdict(sample), "turns": msgspec.to_builtins(sample.turns)}


def trl(sample: Sample) -> Row:
    """One completion of what a `rollout_func` of TRL's GRPOTrainer returns.

    The function returns a dict of lists: collect the rows column by column. `prompt_ids`, `completion_ids`
    and `logprobs` must be there; `env_mask` is 1 on ids to train on, and `logprobs` 0.0 on what was not
    sampled. The other fields reach the reward functions as arguments of the same name: one that returns
    `reward` trains on the recorded rewards (None means "cannot be scored" there too).

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
    turn of the model and what came between. `turn_scores` in `extra_fields` holds the rewards of turns that
    have one; the other entries there say where the sample is from.

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
    """The arguments of prime-rl's `TrainingSample`, and the reward of the trace beside them.

    prime-rl has no prompt and completion: `token_ids` is the whole sequence, `mask` true on what is trained,
    `logprobs` 0.0 on what was not sampled. `temperatures` is empty, as its own `trace_to_samples` leaves it:
    the orchestrator knows the temperature and fills it in. It also makes `advantages` out of `reward`, which
    is no field of the struct: `reward = row.pop("reward")`. `env_name` is that of the session's metadata.

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
        "env_name": str(sample.metadata.get("env_name", "")),
        "trace_id": sample.rollout,
        "branch_index": sample.index,
        "reward": sample.reward,
    }


def skyrl(sample: Sample) -> Row:
    """One entry of each list of SkyRL's `GeneratorOutput`.

    That type holds a batch as a dict of lists: collect the rows column by column. `rollout_logprobs` is 0.0
    where nothing was sampled. `stop_reasons` are the engine's own words: a turn that ended with tool calls is
    a `stop`, for SkyRL takes all others for broken off. `env_metrics` says where the sample is from.

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
    """Log-probabilities with 0.0 where nothing was sampled."""
    return [0.0 if logprob is None else logprob for logprob in sample.logprobs]


def _origin(sample: Sample) -> Row:
    """Where a sample is from; every row has the same keys, as batches want it."""
    return {
        "rollout": sample.rollout,
        "leaf": sample.leaf,
        "whole": sample.whole,
        "model": sample.model,
        "finish_reason": sample.finish_reason,
        "weight_versions": [
            msgspec.to_builtins(span) for turn in sample.turns for span in turn.weight_versions
        ],
    }


LAYOUTS: Mapping[str, Layout] = {
    "plain": Layout(
        {
            "rollout": "text",
            "leaf": "text",
            "index": "integer",
            "whole": "flag",
            "session": "flag",
            "model": "text",
            "prompt_ids": "ids",
            "completion_ids": "ids",
            "loss_mask": "mask",
            "logprobs": "floats",
            "turns": "json",
            "finish_reason": "text",
            "reward": "number",
            "messages": "json",
            "tools": "json",
            "template_kwargs": "json",
            "metadata": "json",
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
