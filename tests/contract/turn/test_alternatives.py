"""The most probable tokens at each sampled id, and how many prompt ids were cached, are recorded."""

import json

import httpx

from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import CHAT, user


def test_they_are_recorded_with_the_turn(client: httpx.Client, fake: FakeVllm) -> None:
    top = [{"token": "h", "logprob": -0.5, "bytes": [104]}, {"token": "é", "logprob": -1.5, "bytes": None}]
    logprobs = {"content": [{"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": top}]}
    choice = {"index": 0, "message": {"content": "h"}, "finish_reason": "stop", "token_ids": [74]}
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 384}}
    body = {"choices": [{**choice, "logprobs": logprobs}], "prompt_token_ids": [1], "usage": usage}
    content = json.dumps(body, separators=(",", ":")).encode()  # as vLLM writes it
    fake.canned[CHAT] = Canned(content, headers={"content-type": "application/json"})
    asked = {"messages": [user("with alternatives")], "logprobs": True, "top_logprobs": 2}
    client.post(CHAT, json=asked, headers={"x-session-id": "alternatives"})
    [turn] = client.get("/v1/sessions/alternatives?ids=true").json()["turns"]
    assert turn["cached_tokens"] == 384
    assert turn["alternatives"] == [[{"token": "h", "logprob": -0.5}, {"token": "é", "logprob": -1.5}]]
