"""Programs of docs/trainers, as they are written there, return what their trainers read."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Reply
from tests.support.talk import CHAT, Talk, user
from tokenproxy.samples.layouts import LAYOUTS

_PAGES = Path(__file__).parents[3] / "docs" / "trainers"


def _program(page: str, url: object) -> str:
    code, *_ = re.findall(r"```python\n(.*?)```", (_PAGES / page).read_text(), re.DOTALL)
    return str(code).replace("http://127.0.0.1:8100", str(url).rstrip("/"))


async def test_the_agent_loop_of_verl(talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own class is replaced: the program passes it the fields of verl's type, and nothing else.

    It runs twice on one store with the same prompt at the same step.
    """
    pair = talk().pair

    async def run_agent(prompt: list[dict[str, Any]], base_url: str, api_key: str) -> float:
        async with httpx.AsyncClient() as client:
            for reply in ((74, 71, 2), (90, 2)):
                pair.fake.replies.append(Reply(reply))
                answer = await client.post(f"{base_url}/chat/completions", json={"messages": prompt})
                prompt = [*prompt, answer.json()["choices"][0]["message"], user("more")]
        return 0.5

    verl = ModuleType("verl.experimental.agent_loop.agent_loop")
    vars(verl).update(AgentLoopBase=object, AgentLoopOutput=dict)
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, verl.__name__, verl)
    names: dict[str, Any] = {"run_agent": run_agent}
    exec(_program("verl.md", pair.client.base_url), names)
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    loop = names["TokenproxyAgentLoop"]()
    loop.config = SimpleNamespace(trainer=SimpleNamespace(experiment_name="colours"))
    row = {"raw_prompt": [user("One, says verl")], "global_steps": 4, "extra_info": {"split": "test"}}
    rollouts = set()
    for _ in range(2):
        output = await loop.run(sampling, **row)
        assert output.keys() == LAYOUTS["verl"].columns.keys()
        sampled = [i for i, mask in zip(output["response_ids"], output["response_mask"], strict=True) if mask]
        assert (sampled, output["reward_score"]) == ([74, 71, 2, 90, 2], 0.5)
        assert output["extra_fields"]["turns_after_finish"] == 0
        rollouts.add(output["extra_fields"]["rollout"])
        *_, sent = (seen.json for seen in pair.fake.requests if seen.path == CHAT)
        assert [sent[name] for name in ("temperature", "top_p", "top_k")] == [0.5, 0.75, -1]
    for name in rollouts:
        described = pair.client.get(f"/v1/sessions/{name}").json()
        assert described["metadata"] == {"run": "colours", "step": 4, "split": "test"}
    assert len(rollouts) == 2


def test_the_rollout_func_of_trl(talk: Callable[..., Talk]) -> None:
    """Twice on one store, as a run and its evaluation at the same step; the agents of a step run at once."""
    pair, together = talk().pair, Barrier(2, timeout=20)

    def run_agent(prompt: str, base_url: str, api_key: str) -> float:
        """Two turns; the reward is the first word of the prompt."""
        messages = [user(prompt)]
        for _ in range(2):
            together.wait()
            answer = pair.client.post(f"{base_url}/chat/completions", json={"messages": messages})
            messages += [answer.json()["choices"][0]["message"], user("more")]
        return float(prompt.split()[0])

    names: dict[str, Any] = {"run_agent": run_agent}
    exec(_program("trl.md", pair.client.base_url), names)
    seen: set[str] = set()
    for split in ("train", "eval"):
        pair.fake.replies += [Reply((74, 71, 2))] * 2 + [Reply((90, 2))] * 2
        trainer = SimpleNamespace(
            args=SimpleNamespace(run_name=None, output_dir="colours", temperature=0.5),
            state=SimpleNamespace(global_step=4),
            model=SimpleNamespace(training=split == "train"),
        )
        output = names["rollout_func"](["1 says TRL", "2 says TRL"], trainer)
        assert output.keys() == LAYOUTS["trl"].columns.keys()
        assert (output["reward"], output["turns_after_finish"]) == ([1.0, 2.0], [0, 0])
        assert names["recorded_rewards"](**output) == [1.0, 2.0]
        for ids, logprobs, mask in zip(
            output["completion_ids"], output["logprobs"], output["env_mask"], strict=True
        ):
            assert len(logprobs) == len(mask)
            assert [token for token, wanted in zip(ids, mask, strict=True) if wanted] == [74, 71, 2, 90, 2]
            assert all(isinstance(value, float) for value in logprobs)
        assert len(seen | {*output["rollout"]}) == len(seen) + 2
        seen |= {*output["rollout"]}
        for session in output["rollout"]:
            described = pair.client.get(f"/v1/sessions/{session}").json()
            assert described["metadata"] == {"run": "colours", "step": 4, "split": split}
        assert [sent.json["temperature"] for sent in pair.fake.generations()[-4:]] == [0.5] * 4
