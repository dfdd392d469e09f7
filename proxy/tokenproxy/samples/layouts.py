"""Rows of training samples in the field names of trainers: for each trainer the fields of a row.

A row holds only the fields of the trainer's own type, unless the layout's docstring names others. All
per-token lists of a row have the length of its ids. For trainers that need a number for ids that were not
sampled, the log-probability is 0.0, as they write it themselves: their mask excludes these positions. Only
the plain layout distinguishes "not sampled" (null) from a log-probability of 0.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec

from tokenproxy.samples.samples import Sample
from tokenproxy.samples.turn_by_turn import atif_agent, atif_steps, openenv_turns

Row = dict[str, Any]

Kind = Literal["ids", "mask", "flags", "floats", "text", "integer", "number", "flag", "json"]
"""The type of a column. Lists: token ids (ids), 0 and 1 (mask), booleans (flags), floats or null (floats).
Single values: string or null (text), integer, float or null (number), boolean (flag). Or any JSON (json)."""

_ENGINE_STOP = frozenset({"tool_calls", "function_call"})
"""Finish reasons of OpenAI routes for turns that the engine itself ended with `stop`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a row."""

    kind: Kind
    value: Callable[[Sample], Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How samples become rows."""

    columns: Mapping[str, Column]
    """Every field of a row, in order."""

    def row(self, sample: Sample) -> Row:
        """The row of a sample."""
        return {name: column.value(sample) for name, column in self.columns.items()}

    def named(self, kind: Kind) -> list[str]:
        """The fields of this kind."""
        return [name for name, column in self.columns.items() if column.kind == kind]


def _or_zero(sample: Sample) -> list[float]:
    """Log-probabilities, with 0.0 for ids that were not sampled."""
    return [0.0 if logprob is None else logprob for logprob in sample.logprobs]


def _identity(sample: Sample) -> Row:
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
        "continues": sample.continues,
        "segment": sample.segment,
        "turns_after_finish": sample.turns_after_finish,
        "finish_reason": sample.finish_reason,
        "weight_versions": [
            msgspec.to_builtins(span) for turn in sample.turns for span in turn.weight_versions
        ],
    }


def _verl_fields(sample: Sample) -> Row:
    scores = [turn.reward for turn in sample.turns if turn.reward is not None]
    return {"turn_scores": scores, **_identity(sample)}


def _prime_rl_mask(sample: Sample) -> list[bool]:
    return [False] * len(sample.prompt_ids) + [bool(trained) for trained in sample.loss_mask]


def _plain_kind(name: str, kind: Any) -> Kind:
    """The kind of a field of `Sample`, by its type."""
    kinds: dict[Any, Kind] = {
        str: "text",
        str | None: "text",
        int: "integer",
        bool: "flag",
        float | None: "number",
        list[int]: "mask" if name == "loss_mask" else "ids",
        list[float | None]: "floats",
    }
    return kinds.get(kind, "json")


PLAIN = Layout(
    {
        field.name: Column(_plain_kind(field.name, field.type), attrgetter(field.name))
        for field in msgspec.structs.fields(Sample)
    }
)
"""The fields of `tokenproxy.samples.samples.Sample`, all of them."""

TRL = Layout(
    {
        "prompt_ids": Column("ids", lambda sample: sample.prompt_ids),
        "completion_ids": Column("ids", lambda sample: sample.completion_ids),
        "logprobs": Column("floats", _or_zero),
        "env_mask": Column("mask", lambda sample: sample.loss_mask),
        "reward": Column("number", lambda sample: sample.reward),
        "rollout": Column("text", lambda sample: sample.rollout),
        "leaf": Column("text", lambda sample: sample.leaf),
        "finish_reason": Column("text", lambda sample: sample.finish_reason),
        "turns_after_finish": Column("integer", lambda sample: sample.turns_after_finish),
    }
)
"""One completion of what a `rollout_func` of TRL's GRPOTrainer returns.

The function returns a dict of lists: collect the rows column by column. TRL requires `prompt_ids`,
`completion_ids` and `logprobs`; `env_mask` is 1 on ids to train on, and `logprobs` 0.0 on ids that were
not sampled. The other fields reach the reward functions as arguments of the same name: a reward function
that returns `reward` trains on the recorded rewards (None means "cannot be scored" there too).

Source: trl 1.16.0, trl/trainer/grpo_trainer.py: `RolloutFunc`, `GRPOTrainer._generate`.
"""

VERL = Layout(
    {
        "prompt_ids": Column("ids", lambda sample: sample.prompt_ids),
        "response_ids": Column("ids", lambda sample: sample.completion_ids),
        "response_mask": Column("mask", lambda sample: sample.loss_mask),
        "response_logprobs": Column("floats", _or_zero),
        "reward_score": Column("number", lambda sample: sample.reward),
        "num_turns": Column("integer", lambda sample: 2 * len(sample.turns)),
        "metrics": Column("json", lambda sample: {}),
        "extra_fields": Column("json", _verl_fields),
    }
)
"""The arguments of verl's `AgentLoopOutput`: `AgentLoopOutput(**row)`.

`response_logprobs` is 0.0 where nothing was sampled. `num_turns` counts, as verl does, the prompt, each
turn of the model and the messages between them. In `extra_fields`, `turn_scores` holds the rewards of
those turns that have one; the other entries identify the sample.

Source: verl 0.9.1, verl/experimental/agent_loop/agent_loop.py: `AgentLoopOutput`;
verl/experimental/agent_loop/tool_agent_loop.py: `num_turns`, `turn_scores`.
"""

PRIME_RL = Layout(
    {
        "token_ids": Column("ids", lambda sample: sample.prompt_ids + sample.completion_ids),
        "mask": Column("flags", _prime_rl_mask),
        "logprobs": Column("floats", lambda sample: [0.0] * len(sample.prompt_ids) + _or_zero(sample)),
        "temperatures": Column("floats", lambda sample: []),
        "env_name": Column("text", lambda sample: str((sample.metadata or {}).get("env_name", ""))),
        "trace_id": Column("text", lambda sample: sample.rollout),
        "branch_index": Column("integer", lambda sample: sample.index),
        "reward": Column("number", lambda sample: sample.reward),
    }
)
"""The arguments of prime-rl's `TrainingSample`, and the trace's id, branch and reward.

prime-rl does not separate prompt and completion: `token_ids` is the whole sequence, `mask` is true on ids
to train on, `logprobs` 0.0 on ids that were not sampled. `temperatures` is empty, as prime-rl's own
`trace_to_samples` leaves it: the orchestrator fills it in. The orchestrator also computes `advantages`
from the reward, which is not a field of the struct: `reward = row.pop("reward")`. Nor are `trace_id` and
`branch_index` in prime-rl 559b447 (2026-08-21). `env_name` is taken from the session's metadata.

Source: prime-rl, src/prime_rl/transports/rollouts/types.py: `TrainingSample`;
src/prime_rl/orchestrator/trajectories.py: `trace_to_samples`; src/prime_rl/orchestrator/train_sink.py;
verifiers, verifiers/v1/trace.py: `Branch.logprobs`.
"""

SKYRL = Layout(
    {
        "prompt_token_ids": Column("ids", lambda sample: sample.prompt_ids),
        "response_ids": Column("ids", lambda sample: sample.completion_ids),
        "rewards": Column("number", lambda sample: sample.reward),
        "loss_masks": Column("mask", lambda sample: sample.loss_mask),
        "stop_reasons": Column(
            "text", lambda sample: "stop" if sample.finish_reason in _ENGINE_STOP else sample.finish_reason
        ),
        "rollout_logprobs": Column("floats", _or_zero),
        "env_metrics": Column("json", _identity),
    }
)
"""One entry of each list of SkyRL's `GeneratorOutput`.

That type holds a batch as a dict of lists: collect the rows column by column. `rollout_logprobs` is 0.0
where nothing was sampled. `stop_reasons` are the engine's own: a turn that ended with tool calls has
`stop`, because SkyRL treats every other value as truncated. `env_metrics` identifies the sample.

Source: skyrl 0.3.0, skyrl/train/generators/base.py: `GeneratorOutput`;
skyrl/train/utils/trainer_utils.py: `validate_generator_output`.
"""

OPENENV = Layout(
    {
        "schema_version": Column("integer", lambda sample: 1),
        "turns": Column("json", lambda sample: openenv_turns(sample, _identity(sample))),
    }
)
"""OpenEnv's `TrainingTrace`, which a session's `fetch_training_trace` returns: `TrainingTrace(**row)`.

Its `to_trace_entries()` are the entries that OpenEnv's own capture returns.

Source: openenv 0.10.0, openenv/core/harness/training.py: `TrainingTrace`;
openenv/core/harness/capture/contract.py: `to_trace_entries`.
"""

ATIF = Layout(
    {
        "schema_version": Column("text", lambda sample: "ATIF-v1.8"),
        "session_id": Column("text", lambda sample: sample.rollout),
        "trajectory_id": Column("text", lambda sample: sample.leaf),
        "agent": Column("json", atif_agent),
        "steps": Column("json", atif_steps),
        "extra": Column("json", lambda sample: {"reward": sample.reward, **_identity(sample)}),
    }
)
"""A trajectory in harbor's interchange format: each row is what a file `trajectory.json` holds.

`agent` has the name and version that the session's metadata state as `agent_name` and `agent_version`.

Source: harbor 0.26.0, harbor/models/trajectories/; rfcs/0001-trajectory-format.md.
"""

LAYOUTS: Mapping[str, Layout] = {
    "plain": PLAIN,
    "trl": TRL,
    "verl": VERL,
    "prime-rl": PRIME_RL,
    "skyrl": SKYRL,
    "openenv": OPENENV,
    "atif": ATIF,
}
"""Every layout by its name on the command line."""
