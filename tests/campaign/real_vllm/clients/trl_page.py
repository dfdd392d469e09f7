"""Trains with TRL's own GRPOTrainer and the program of docs/trainers/trl.md; an evaluation follows each step.

    python trl_page.py PAGE URL MODEL RUN     PAGE: the file; MODEL: folder of the checkpoint; RUN: a name

Prints as JSON the fields that the reward function got, call by call.
"""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

STEPS = 2


def run_agent(prompt: str, base_url: str, api_key: str) -> float:
    """Two turns; the reward is the number in the prompt."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(2):
        answer = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8)
        messages += [answer.choices[0].message, {"role": "user", "content": "And another one?"}]
    return float(prompt.split()[-1])


def main(page: str, url: str, model: str, run: str) -> list[dict[str, Any]]:
    """Train `STEPS` steps of one prompt, with a group of two."""
    [program] = re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    names: dict[str, Any] = {"run_agent": run_agent}
    exec(program.replace("http://127.0.0.1:8100", url), names)
    calls: list[dict[str, Any]] = []

    def rewards(prompts: list[str], **fields: Any) -> list[float]:
        read = ("rollout", "reward", "turns_after_finish", "completion_ids")
        calls.append({"prompts": prompts, **{name: fields[name] for name in read}})
        found: list[float] = names["recorded_rewards"](**fields)
        return found

    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            rollout_func=names["rollout_func"],
            reward_funcs=rewards,
            train_dataset=Dataset.from_dict({"prompt": [f"Name colour {n}" for n in range(STEPS)]}),
            eval_dataset=Dataset.from_dict({"prompt": ["Name colour 7"]}),
            args=GRPOConfig(
                output_dir=folder,
                run_name=run,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=2,
                per_device_eval_batch_size=2,
                num_generations=2,
                max_steps=STEPS,
                eval_strategy="steps",
                eval_steps=1,
                shuffle_dataset=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return calls


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
