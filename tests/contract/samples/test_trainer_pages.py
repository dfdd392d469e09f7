"""Programs of docs/trainers, as they are written there, return what their trainers read."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Reply
from tests.support.talk import CHAT, Talk, user
from tokenproxy.samples.layouts import LAYOUTS

_PAGES = Path(__file__).parents[3] / "docs" / "trainers"


def _program(page: str, url: object) -> str:
    [code] = re.findall(r"```python\n(.*?)```", (_PAGES / page).read_text(), re.DOTALL)
    return str(code).replace("http://127.0.0.1:8100", str(url).rstrip("/"))


async def test_the_agent_loop_of_verl(talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own class is replaced: the program passes it the fields of verl's type, and nothing else."""
    pair = talk().pair

    async def run_agent(prompt: list[dict[str, Any]], base_url: str) -> float:
        async with httpx.AsyncClient() as client:
            for reply in ((74, 71, 2), (90, 2)):
                pair.fake.replies.append(Reply(reply))
                answer = await client.post(f"{base_url}/chat/completions", json={"messages": prompt})
                prompt = [*prompt, answer.json()["choices"][0]["message"], user("more")]
        return 0.5

    verl = ModuleType("verl.experimental.agent_loop.agent_loop")
    vars(verl).update(AgentLoopBase=object, AgentLoopOutput=dict, register=lambda name: lambda loop: loop)
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, verl.__name__, verl)
    names: dict[str, Any] = {"run_agent": run_agent}
    exec(_program("verl.md", pair.client.base_url), names)
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    output = await names["TokenproxyAgentLoop"]().run(sampling, raw_prompt=[user("One, says verl")])
    assert output.keys() == LAYOUTS["verl"].columns.keys()
    sampled = [i for i, mask in zip(output["response_ids"], output["response_mask"], strict=True) if mask]
    assert (sampled, output["reward_score"]) == ([74, 71, 2, 90, 2], 0.5)
    *_, sent = (seen.json for seen in pair.fake.requests if seen.path == CHAT)
    assert [sent[name] for name in ("temperature", "top_p", "top_k")] == [0.5, 0.75, -1]


def test_the_rollout_func_of_trl(talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = talk().pair
    sampled: list[list[int]] = []

    def run_agent(prompt: str, base_url: str) -> float:
        """Two turns; the reward is the number of the session."""
        messages = [user(prompt)]
        for reply in ((74, 71, 2), (90, 2)):
            pair.fake.replies.append(Reply(reply))
            answer = pair.client.post(f"{base_url}/chat/completions", json={"messages": messages}).json()
            messages += [answer["choices"][0]["message"], user("more")]
            sampled.append(list(reply))
        return float(base_url.split("/")[-2].split("-")[-1])

    monkeypatch.setattr(httpx, "post", pair.client.post)
    monkeypatch.setattr(httpx, "get", pair.client.get)
    names: dict[str, Any] = {"run_agent": run_agent}
    exec(_program("trl.md", pair.client.base_url), names)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=4))
    output = names["rollout_func"](["One, says TRL", "Two, says TRL"], trainer)

    assert output.keys() >= {"prompt_ids", "completion_ids", "logprobs", "env_mask", "reward"}
    assert {len(values) for values in output.values()} == {2}
    assert output["reward"] == [0.0, 1.0]
    rows = zip(output["completion_ids"], output["logprobs"], output["env_mask"], strict=True)
    for ids, logprobs, mask in rows:
        assert len(ids) == len(logprobs) == len(mask)
        trained = [token for token, wanted in zip(ids, mask, strict=True) if wanted]
        assert trained == [74, 71, 2, 90, 2]
        assert all(isinstance(value, float) for value in logprobs)
