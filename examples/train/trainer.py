"""GRPO with TRL's own trainer: a function gives it rollouts, and the running vLLM gets its weights."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from examples.train.mismatch import Mismatch
from examples.train.report import Step
from examples.train.rollouts import Rollout, Rollouts

GROUP = 4
"""Rollouts of one game, whose rewards are compared."""
_MICRO_BATCH = 2
"""Rollouts of one forward pass."""


class Engine:
    """The running vLLM, which gets its weights through the proxy."""

    def __init__(self, proxy_url: str, engine_url: str, folder: Path) -> None:
        """`folder` holds the checkpoints that the engine reads."""
        self._proxy = httpx.Client(base_url=proxy_url, timeout=300, trust_env=False)
        self._engine = httpx.Client(base_url=engine_url, timeout=60, trust_env=False)
        self._folder = folder

    def update(self, model: PreTrainedModel, version: str) -> None:
        """Make the engine sample with the weights of `model`.

        The engine reads them from a checkpoint, because vLLM transfers weights between GPUs only. The proxy
        sends each call to all engines of its fleet.
        """
        checkpoint = self._folder / version
        model.save_pretrained(checkpoint)
        self._call("/pause")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self._call("/collective_rpc", reload)
        self._call("/reset_prefix_cache")
        self._call("/update_weight_version", {"new_version": version})
        self._call("/resume")
        shutil.rmtree(checkpoint)

    def prefix_tokens(self) -> tuple[float, float]:
        """Prompt tokens that vLLM looked up in its prefix cache so far, and those that it found."""
        text = self._engine.get("/metrics").text
        queries, hits = (
            sum(map(float, re.findall(rf"(?m)^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text)))
            for name in ("queries", "hits")
        )
        return queries, hits

    def _call(self, path: str, body: dict[str, Any] | None = None) -> None:
        response = self._proxy.post(path, json=body)
        if response.is_error:
            raise RuntimeError(f"{path}: {response.status_code} {response.text}")


class _Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which also compares its log-probabilities with the recorded ones before each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.mismatch = Mismatch()
        self._computed = torch.empty(0)
        super().__init__(*arguments, **options)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **options)
        self._computed = found[0].detach()
        return found

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """See `transformers.Trainer.compute_loss`."""
        loss = super().compute_loss(model, inputs, *arguments, **options)
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        rows = (mask, inputs["sampling_per_token_logps"], self._computed)
        self.mismatch.add(*(tensor.flatten().tolist() for tensor in rows))
        return loss


class _Run(TrainerCallback):  # type: ignore[misc]
    """One run: what TRL asks for at the beginning of a step, and what it reports at its end."""

    def __init__(self, rollouts: Rollouts, engine: Engine, on_step: Callable[[Step], None]) -> None:
        self._rollouts = rollouts
        self._engine = engine
        self._on_step = on_step
        self._began = time.monotonic()
        self._played: list[Rollout] = []
        self._prefix_hits = 0.0
        self.trainer: _Trainer | None = None

    def sample(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play the games of a step with the trainer's weights: TRL's `rollout_func`."""
        step = trainer.state.global_step + 1
        self._engine.update(trainer.model, f"{self._rollouts.name}-{step}")
        queries, hits = self._engine.prefix_tokens()
        self._played = self._rollouts.play(list(map(int, prompts)), step)
        queries_after, hits_after = self._engine.prefix_tokens()
        self._prefix_hits = (hits_after - hits) / max(queries_after - queries, 1)
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in self._played],
            "completion_ids": [rollout.completion_ids for rollout in self._played],
            "logprobs": [rollout.logprobs for rollout in self._played],
            "env_mask": [rollout.mask for rollout in self._played],
            "reward": [rollout.reward for rollout in self._played],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See `transformers.TrainerCallback`."""
        assert self.trainer is not None
        mismatch, self.trainer.mismatch = self.trainer.mismatch, Mismatch()
        began, self._began = self._began, time.monotonic()
        self._on_step(
            Step(
                run=self._rollouts.name,
                step=state.global_step,
                reward=fmean(rollout.reward for rollout in self._played),
                differing=mismatch.share,
                unsampled=mismatch.unsampled_share,
                samples=fmean(rollout.samples for rollout in self._played),
                prefix_hits=self._prefix_hits,
                tokens=mismatch.trained,
                seconds=self._began - began,
            )
        )


def train(
    rollouts: Rollouts,
    engine: Engine,
    checkpoint: Path,
    steps: int,
    games: int,
    on_step: Callable[[Step], None],
) -> None:
    """Train a model from a checkpoint; report every step. In each, `games` games are played by a group."""
    run = _Run(rollouts, engine, on_step)
    with TemporaryDirectory() as folder:
        trainer = _Trainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(checkpoint),
            reward_funcs=_rewards,
            rollout_func=run.sample,
            train_dataset=Dataset.from_dict({"prompt": [str(number + 1) for number in range(games * steps)]}),
            callbacks=[run],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,  # float32, as the engine computes
                gradient_checkpointing=False,
                per_device_train_batch_size=_MICRO_BATCH,
                gradient_accumulation_steps=GROUP * games // _MICRO_BATCH,
                num_generations=GROUP,
                temperature=1.0,
                max_steps=steps,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                shuffle_dataset=False,
                report_to="none",
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        run.trainer = trainer
        trainer.train()


def _rewards(reward: list[float], **_: Any) -> list[float]:
    """The rewards of the environment: TRL passes on what `_Run.sample` returns."""
    return reward
