"""Plays two prompts twice with verl's own AgentLoopManager and the agent loop of docs/trainers/verl.md.

    python verl_page.py MODEL LOOPS ADDRESS    in a Ray cluster; LOOPS: the file of agent loops
                                               ADDRESS: host and port of the vLLM that stands for verl's

Prints for each run, as JSON, what verl got for each prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

_READ = ("rollout", "turns_after_finish", "__num_turns__")


class Server:
    """Stands for verl's `vLLMHttpServer`, which needs a GPU: an actor that tells an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get_server_address(self) -> tuple[str, int]:
        """As verl's."""
        host, _, port = self._address.partition(":")
        return host, int(port)


def main(model: str, loops: str, address: str) -> list[list[dict[str, Any]]]:
    """Two runs, each with workers of its own."""
    ray.init(log_to_driver=False)
    options = {"name": "vllm_server_0_0", "num_cpus": 0}
    server = ray.remote(Server).options(**options).remote(address)
    ray.get(server.get_server_address.remote())
    input("")  # until the proxy has found it
    return [_run(model, loops, {address: server}) for _ in range(2)]


def _run(model: str, loops: str, servers: dict[str, Any]) -> list[dict[str, Any]]:
    rollout = "actor_rollout_ref.rollout"
    overrides = {
        "actor_rollout_ref.model.path": model,
        "trainer.experiment_name": "colours",
        f"{rollout}.name": "vllm",
        f"{rollout}.prompt_length": 128,
        f"{rollout}.response_length": 128,
        f"{rollout}.agent.num_workers": 2,
        f"{rollout}.agent.agent_loop_config_path": loops,
        f"{rollout}.agent.default_agent_loop": "tokenproxy_agent",
    }
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose("ppo_trainer", [f"{name}={value}" for name, value in overrides.items()])
    client = LLMServerClient(config, get_router_handle(servers=servers, router_config_path=None))
    manager = AgentLoopManager.create(config, client)
    prompts = [[{"role": "user", "content": f"Name colour {number}"}] for number in range(2)]
    batch = DataProto.from_dict(
        non_tensors={
            "raw_prompt": _column(prompts),
            "global_steps": _column([4, 4]),
            "extra_info": _column([{"split": "train"}] * 2),
        },
        meta_info={"global_steps": 4, "validate": False},
    )
    found = manager.generate_sequences(batch)
    rows = [{name: value.tolist() for name, value in found.batch.items()}]
    fields = {name: list(found.non_tensor_batch[name]) for name in _READ}
    for worker in manager.agent_loop_workers:
        ray.kill(worker)
    return [
        {name: values[place] for name, values in {**rows[0], **fields}.items()}
        for place in range(len(prompts))
    ]


def _column(values: list[Any]) -> "np.ndarray[Any, Any]":
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:]), default=int))
