"""NeMo-RL's contract on a real engine: ids go out on messages, come back on them, and no id drifts.

The client is NeMo-Gym's vLLM model server as far as a server can see it: it keeps whole messages, sends the
request fields below, and reads the ids from the message of the response. (NeMo-Gym is on no package index.)
"""

from typing import Any
from uuid import uuid4

import pytest

from proxy.demo.tools import TOOLS, call_tool
from tests.campaign.real_vllm.conftest import Served, every_spelling
from tests.campaign.real_vllm.plain import CHAT, user

ASKING = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
CALL = {"tools": list(TOOLS), "tool_choice": "required", "max_tokens": 64}
SAY = {"tools": list(TOOLS), "tool_choice": "none", "max_tokens": 8}


@every_spelling
@pytest.mark.parametrize("with_ids", [False, True], ids=["ids on messages", "ids in both places"])
def test_a_rollout_of_nemo_gym(server: Served, with_ids: bool) -> None:
    body: dict[str, Any] = {"model": "smollm2", "temperature": 1.0, "top_p": 1.0, **ASKING}
    if with_ids:  # `request_prompt_and_generation_token_ids` of its configuration
        body["return_token_ids"] = True
    messages: list[dict[str, Any]] = []
    before: list[int] = []
    with server.http() as http:
        for text, options in (("What is 18 * 7?", CALL), ("And so?", SAY), ("Again!", CALL), ("Well?", SAY)):
            messages.append(user(f"{text} {uuid4().hex}"))
            response = http.post(CHAT, json={**body, **options, "messages": messages})
            assert response.status_code == 200, response.text
            completion = response.json()
            [choice] = completion["choices"]
            message = choice["message"]
            prompt, sampled = message["prompt_token_ids"], message["generation_token_ids"]
            logprobs = message["generation_log_probs"]

            assert prompt[: len(before)] == before
            assert len(prompt) == completion["usage"]["prompt_tokens"]
            assert len(sampled) == completion["usage"]["completion_tokens"] == len(logprobs)
            # the sources that NeMo-Gym compares the message with
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in sampled]
            assert [entry["logprob"] for entry in content] == pytest.approx(logprobs, abs=1e-6)
            if with_ids:
                assert (completion["prompt_token_ids"], choice["token_ids"]) == (prompt, sampled)
            if before:
                assert response.headers["x-prompt-reason"] == "prefix_given"
                assert response.headers["x-prompt-reused"] == str(len(before))

            # a stop token that was not sampled is added by the template's rendering
            before = [*prompt, *sampled]
            messages.append(message)
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": call_tool(call["function"]["name"], call["function"]["arguments"]),
                }
                for call in message.get("tool_calls") or []
            ]
            asked = {"messages": [*messages, user("next")], "tools": list(TOOLS)}
            tokens = http.post("/tokenize", json=asked).json()["tokens"]
            assert tokens[: len(before)] == before


def test_an_edited_history_is_refused(server: Served) -> None:
    with server.http() as http:
        first = http.post(CHAT, json={"messages": [user("What is 2 + 2?")], "max_tokens": 8, **ASKING}).json()
        turn = first["choices"][0]["message"]
        edited = [user("What is 3 + 3, by the way?"), turn, user("And so?")]
        refused = http.post(CHAT, json={"messages": edited, "max_tokens": 8, **ASKING})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prefix_mismatch")
    assert refused.json()["error"]["param"] == "messages[1].prompt_token_ids"
