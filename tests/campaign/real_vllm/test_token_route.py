"""The token route on a real vLLM: the engine consumes what goes in, and answers what it sampled."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import INSIDE, Served, every_spelling

ROUTE = "/v1/chat/completions/tokens"
PROMPT = [1, 4093, 198, 2683, 2, 198, 1, 520, 9531, 198]
"""Ids of a ChatML prompt that no tokeniser would produce from its text."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "strict": True,  # without it vLLM lets the model ramble on until its length ends the call
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream; checks that it ends with [DONE]."""
    last = ""
    for line in response.iter_lines():
        if line.startswith("data: "):
            last = line[6:]
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]"


@every_spelling
@pytest.mark.parametrize("name", ["prompt_ids", "tokens", "prompt_token_ids"])
def test_engine_consumes_the_given_ids(server: Served, name: str) -> None:
    with server.http() as http:
        answer = http.post(ROUTE, json={name: PROMPT, "max_tokens": 4, "logprobs": True, "model": "smollm2"})
    body = answer.json()
    assert answer.status_code == 200, body
    assert body["object"] == "chat.completion"
    assert body["prompt_token_ids"] == PROMPT
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    [choice] = body["choices"]
    assert (
        len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"]
    )
    assert answer.headers["x-prompt-source"] == "given"
    assert answer.headers["x-prompt-reason"] == "ids_given"
    assert answer.headers["x-prompt-reused"] == str(len(PROMPT))


@every_spelling
def test_stream_carries_the_same_ids_as_a_whole_answer(server: Served) -> None:
    request = {
        "prompt_ids": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    with server.http() as http:
        whole = http.post(ROUTE, json={k: v for k, v in request.items() if k != "stream_options"}).json()
        with http.stream("POST", ROUTE, json=request | {"stream": True}) as response:
            assert response.headers["x-prompt-source"] == "given"
            chunks = list(events(response))
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert all(chunk.get("prompt_token_ids") is None for chunk in chunks[1:])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    sampled = [token for choice in choices for token in choice.get("token_ids") or []]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert sampled == whole["choices"][0]["token_ids"]
    assert text == whole["choices"][0]["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@every_spelling
@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(server: Served, stream: bool) -> None:
    request = {"prompt_ids": PROMPT, "max_tokens": 5, "temperature": 1.2, "seed": 7, "n": 3, "stream": stream}
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with server.http() as http:
        if stream:
            with http.stream("POST", ROUTE, json=request) as response:
                for chunk in events(response):
                    for choice in chunk["choices"]:
                        ids[choice["index"]] += choice.get("token_ids") or []
        else:
            for choice in http.post(ROUTE, json=request).json()["choices"]:
                ids[choice["index"]] = choice["token_ids"]
    assert all(0 < len(sampled) <= 5 for sampled in ids.values())
    assert len({tuple(sampled) for sampled in ids.values()}) > 1


@every_spelling
def test_ids_can_be_left_out(server: Served) -> None:
    with server.http() as http:
        body = http.post(
            ROUTE, json={"prompt_ids": PROMPT, "max_tokens": 2, "return_token_ids": False}
        ).json()
    assert body.get("prompt_token_ids") is None
    assert body["choices"][0].get("token_ids") is None


def test_first_turn_is_rendered_by_the_engine(server: Served) -> None:
    messages = [{"role": "user", "content": "Say hi"}]
    with server.http() as http:
        answer = http.post(ROUTE, json={"messages": messages, "max_tokens": 2})
        rendered = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert answer.json()["prompt_token_ids"] == rendered
    assert answer.headers["x-prompt-source"] == "rendered"
    assert answer.headers["x-prompt-reason"] == "no_ids"


@every_spelling
def test_tool_calls_are_parsed_and_the_conversation_stays_exact(server: Served) -> None:
    """Five turns with the unmodified SDK; each prompt starts with the one before and its sampled ids."""
    client = server.client()
    so_far: list[int] = []
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Weather in Paris and in Rome, please."}]
    }
    cached: list[int] = []
    for turn in range(5):
        calls_tools = turn % 2 == 0
        response = client.post(
            "/chat/completions/tokens",
            cast_to=httpx.Response,
            body={
                **body,
                "model": "smollm2",
                "tools": TOOLS,
                "tool_choice": "required" if calls_tools else "none",
                "temperature": 1.3,
                "seed": turn,
                "max_tokens": 150 if calls_tools else 40,
            },
        )
        answer = response.json()
        [choice] = answer["choices"]
        assert answer["prompt_token_ids"][: len(so_far)] == so_far
        if turn:
            assert response.headers["x-prompt-source"] == "extended"
            assert response.headers["x-prompt-reused"] == str(len(so_far))
            appended = len(answer["prompt_token_ids"]) - len(so_far)
            assert response.headers["x-prompt-appended"] == str(appended)
        so_far = answer["prompt_token_ids"] + choice["token_ids"]
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        if calls_tools:
            calls = choice["message"]["tool_calls"]
            assert calls and all(call["function"]["name"] == "get_weather" for call in calls)
            assert choice["finish_reason"] in ("tool_calls", "stop")
            new = [{"role": "tool", "tool_call_id": call["id"], "content": "17 °C, rain"} for call in calls]
        else:
            new = [{"role": "user", "content": "And  tomorrow?"}]
        body = {"prompt_ids": so_far, "append_messages": new}
    assert len(so_far) > 300
    # whole blocks of 128 of the earlier turns come out of the prefix cache
    assert cached[-1] >= 256


@pytest.mark.parametrize("server", [INSIDE], indirect=True)
def test_both_api_server_processes_stay_exact_under_load(server: Served) -> None:
    def turn(seed: int) -> None:
        prompt = [*PROMPT, 500 + seed]
        with server.http() as http:
            body = http.post(ROUTE, json={"prompt_ids": prompt, "max_tokens": 8, "seed": seed}).json()
        assert body["prompt_token_ids"] == prompt

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(turn, range(48)))


def test_structured_output_and_history_are_honoured(server: Served) -> None:
    request = {
        "prompt_ids": PROMPT,
        "messages": [{"role": "user", "content": "Answer yes or no"}],
        "structured_outputs": {"choice": ["surely", "never"]},
        "max_tokens": 20,
        "temperature": 1.0,
    }
    with server.http() as http:
        body = http.post(ROUTE, json=request).json()
    assert body["prompt_token_ids"] == PROMPT
    assert body["choices"][0]["message"]["content"] in ("surely", "never")
