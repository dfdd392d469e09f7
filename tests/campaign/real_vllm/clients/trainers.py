"""Clients of trainers, which send ids: NeMo-Gym by its contract, and TRL's own."""

import asyncio
import secrets
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.clients.target import MODEL, QUESTIONS, Target
from tests.support.talk import CHAT
from tests.support.trl_client import load_client
from tokenproxy.demo.tools import TOOLS, call_tool


async def hold_nemo_gym(target: Target, *, ids: bool) -> None:
    """NeMo-Gym's vLLM model server as far as a server can see it. (It is on no package index.)

    It keeps whole messages, sends the request fields below, and reads the ids from the message of the answer.
    """
    asked: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "top_p": 1.0, "max_tokens": 256}
    asked |= {"tools": TOOLS, "logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
    if ids:  # `request_prompt_and_generation_token_ids` of its configuration
        asked["return_token_ids"] = True
    messages: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=target.root, timeout=280) as http:
        for text, choice, _ in QUESTIONS:
            messages.append({"role": "user", "content": text})
            body = {**asked, "messages": messages, "tool_choice": choice}
            answer = (await http.post(CHAT, json=body)).raise_for_status().json()
            [found] = answer["choices"]
            message = found["message"]
            prompt, sampled = message["prompt_token_ids"], message["generation_token_ids"]
            # the sources that NeMo-Gym compares the message with
            content = found["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in sampled]
            assert [e["logprob"] for e in content] == pytest.approx(message["generation_log_probs"], abs=1e-6)
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            if ids:
                assert (answer["prompt_token_ids"], found["token_ids"]) == (prompt, sampled)
            target.ids.append((prompt, sampled))
            messages.append(message)
            for call in message.get("tool_calls") or []:
                said = call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
            rendered = {"messages": [*messages, {"role": "user", "content": "next"}], "tools": TOOLS}
            tokens = (await http.post("/tokenize", json=rendered)).json()["tokens"]
            assert tokens[: len(prompt + sampled)] == prompt + sampled


async def hold_trl(target: Target) -> None:
    """TRL's current client: ids in and out, each prompt continues the last, as in a loop of tools.

    It needs more routes than the base URL of a session has; the proxy recognises the ids.
    """
    prompt = [1000 + secrets.randbelow(30_000) for _ in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        client = load_client(patch)(base_url=target.url)
        for _ in range(4):
            answer = await asyncio.to_thread(
                client.generate, [prompt], max_tokens=4, temperature=1.0, logprobs=0
            )
            [sampled], [logprobs] = answer["completion_ids"], answer["logprobs"]
            assert answer["prompt_ids"] == [prompt] and len(logprobs) == len(sampled)
            target.ids.append((prompt, sampled))
            prompt = [*prompt, *sampled, *range(2000, 2009)]
    async with httpx.AsyncClient(base_url=target.url, timeout=280) as http:
        for session in (await http.get("/v1/sessions?limit=5")).json()["data"]:
            turns = (await http.get(f"/v1/sessions/{session['id']}?ids=true")).json()["turns"]
            if turns and turns[0]["appended_ids"] == target.ids[0][0]:
                target.session = session["id"]
