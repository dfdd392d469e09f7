"""The `rollout_func` of docs/trainers/trl.md returns what TRL's GRPOTrainer reads."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Reply
from tests.support.talk import Talk, user

_PAGE = Path(__file__).parents[3] / "docs" / "trainers" / "trl.md"


def test_the_rollout_func_of_the_page(talk: Callable[..., Talk], monkeypatch: pytest.MonkeyPatch) -> None:
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
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    [code] = [block for block in blocks if "trainer" in block]
    names: dict[str, Any] = {"run_agent": run_agent}
    exec(code.replace("http://127.0.0.1:8100", str(pair.client.base_url).rstrip("/")), names)
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
