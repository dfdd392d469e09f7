"""Requests as OpenAI's SDK sends them: each is answered, whole and as a stream, and equally."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.contract.dialects.responses.dialogue import FUNCTION, async_sdk, engine_body, output_text, sdk
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import call
from tests.support.tiny_model import END

SPLIT = (74, 71, 78, 78, 81, END)
_HI = {"role": "user", "content": "Hi"}
_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
_CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "ls"}
_REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]}
_TEXT = {"type": "input_text", "text": "Hi"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
_SPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [FUNCTION]}

SHAPES: dict[str, dict[str, Any]] = {
    "text": {"input": "Hi"},
    "parts": {"input": [{"role": "user", "content": [_TEXT, _TEXT]}]},
    "instructions and developer": {
        "instructions": "Be brief.",
        "input": [{"role": "developer", "content": "x"}, _HI],
    },
    "an assistant's output": {"input": [_HI, output_text("Hello", id="msg_1", status="completed"), _HI]},
    "a refusal": {
        "input": [_HI, {**output_text(""), "content": [{"type": "refusal", "refusal": "no"}]}, _HI]
    },
    "a result of parts": {"input": [_HI, _CALL, {**_RESULT, "output": [_TEXT]}]},
    "interleaved calls": {
        "input": [_HI, _CALL, _RESULT, {**_CALL, "call_id": "c2"}, {**_RESULT, "call_id": "c2"}]
    },
    "reasoning with content": {
        "input": [
            _HI,
            {**_REASONING, "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            _CALL,
            _RESULT,
        ]
    },
    "encrypted reasoning of another server": {
        "input": [
            _HI,
            {**_REASONING, "summary": [], "encrypted_content": "gAAAAB"},
            output_text("Hello"),
            _HI,
        ],
        "include": ["reasoning.encrypted_content"],
        "store": False,
    },
    "a custom call": {
        "input": [_HI, _CUSTOM, {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}],
        "tools": [{"type": "custom", "name": "sh", "description": "d", "format": {"type": "text"}}],
    },
    "a call of a namespace": {"input": [_HI, {**_CALL, "namespace": "mcp"}, _RESULT], "tools": [_SPACE]},
    "a named choice": {"input": "Hi", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    "a schema": {
        "input": "Hi",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA, "strict": True}},
    },
    "sampling": {"input": "Hi", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 64},
    "log-probabilities": {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "a summary": {"input": "Hi", "reasoning": {"effort": "medium", "summary": "auto"}},
    "what has no effect": {
        "input": "Hi",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "truncation": "auto",
        "stream_options": {"include_obfuscation": False},
        "background": False,
    },
    "vLLM's own fields": {
        "input": "Hi",
        "extra_body": {"top_k": 5, "seed": 1, "chat_template_kwargs": {"enable_thinking": False}},
    },
    "Codex": {
        "input": [{"type": "message", "role": "developer", "content": [_TEXT], "id": "msg_x"}, _HI],
        "instructions": "You are terse.",
        "tools": [FUNCTION, _SPACE, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "extra_body": {"client_metadata": {"session_id": "01a2"}},
    },
}
_REPLY = Reply(SPLIT, message={"reasoning": "so", "content": "well", "tool_calls": [call("f", "{}", "c9")]})


def _plain(response: Any) -> dict[str, Any]:
    """A response without the names of its turn."""
    shown: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "usage"):
        shown.pop(name)
    for item in shown["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("encrypted_content", None)
        for part in item.get("content") or []:
            part.pop("logprobs", None)  # those of a whole turn include those of its reasoning
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    shown.pop("stream_options", None)
    return shown


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_is_answered_whole_and_as_a_stream(
    client: httpx.Client, fake: FakeVllm, shape: dict[str, Any]
) -> None:
    asking = sdk(client)
    answers, bodies = [], []
    for stream in (False, True):
        fake.replies.append(_REPLY)
        if stream:
            *_, last = asking.responses.create(model="tiny", stream=True, **shape)
            assert last.type == "response.completed"
            answers.append(last.response)
        else:
            answers.append(asking.responses.create(model="tiny", **shape))
        body = engine_body(fake)
        bodies.append({key: value for key, value in body.items() if not key.startswith(("stream", "kv_"))})
    assert _plain(answers[0]) == _plain(answers[1])
    assert answers[0].output_text == "well" and answers[0].status == "completed"
    assert bodies[0] == bodies[1]


def test_the_async_sdk(client: httpx.Client, fake: FakeVllm) -> None:
    async def ask() -> None:
        asking = async_sdk(client)
        for shape in list(SHAPES.values())[-2:]:
            fake.replies.append(_REPLY)
            made = await asking.responses.create(model="tiny", **shape)
            fake.replies.append(_REPLY)
            events = [
                event async for event in await asking.responses.create(model="tiny", stream=True, **shape)
            ]
            assert _plain(events[-1].response) == _plain(made)
        await asking.close()

    asyncio.run(ask())
