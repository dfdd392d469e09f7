"""A prompt that was planned for one replica and runs on another, which differs: it is planned anew."""

from typing import Any

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_CHAT = "/v1/chat/completions"


def test_a_new_plan_leaves_the_turn_that_the_first_plan_claimed_to_others(tiny_model: TinyModel) -> None:
    """Of two equal conversations each request continues one. Plans alternate between two replicas."""
    with FakeVllm(tiny_model) as holds, FakeVllm(tiny_model) as differs:
        mode = b'{"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
        differs.canned["/server_info"] = Canned(mode, headers={"content-type": "application/json"})
        settings: dict[str, Any] = {"store": "memory:", "watch_interval_s": 60.0}
        with run_proxy([holds, differs], **settings) as client:
            drained = {"url": differs.url}
            client.post("/admin/replicas/drain", json=drained)
            messages = [{"role": "user", "content": "Hi"}]
            answers = [client.post(_CHAT, json={"messages": messages}) for _ in range(2)]
            began = {answer.headers["x-session-id"] for answer in answers}
            client.post("/admin/replicas", json=drained)
            messages += [answers[0].json()["choices"][0]["message"], {"role": "user", "content": "more"}]
            goes_on = [client.post(_CHAT, json={"messages": messages}) for _ in range(2)]
            assert [answer.headers["x-prompt-source"] for answer in goes_on] == ["extended"] * 2
            assert {answer.headers["x-session-id"] for answer in goes_on} == began
            assert len(began) == 2
