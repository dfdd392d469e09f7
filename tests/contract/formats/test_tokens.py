from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, data_of
from tests.support.fake_wire import Canned, Reply
from tests.support.tiny_model import END, HI, VOCAB_SIZE, TinyModel
from tests.support.utils import EVERY_SPELLING

_TOKENS = "/v1/chat/completions/tokens"
_PROMPT = [1, 74, 75]
_HISTORY = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hi"}]
_NEXT = [{"role": "user", "content": "And then?"}]
_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


def _headers(answer: httpx.Response) -> dict[str, str]:
    return {name[9:]: value for name, value in answer.headers.items() if name.startswith("x-prompt-")}


def _ids(answer: httpx.Response, stream: bool) -> tuple[list[int], list[int]]:
    """Prompt and sampled ids of an answer with one choice."""
    if not stream:
        body = answer.json()
        return body["prompt_token_ids"], body["choices"][0]["token_ids"]
    chunks = list(data_of(answer.content))
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids") is not None]
    assert len(prompts) == 1
    return prompts[0], [
        token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []
    ]


@EVERY_SPELLING
@pytest.mark.parametrize("name", ["prompt_ids", "prompt_token_ids"])
def test_ids_in_and_ids_out(client: httpx.Client, name: str) -> None:
    answer = client.post(_TOKENS, json={name: _PROMPT})
    assert answer.status_code == 200
    assert _ids(answer, False) == (_PROMPT, [*HI, END])
    assert _headers(answer) == {"source": "given", "reused": "3", "appended": "0", "reason": "ids_given"}


@EVERY_SPELLING
@pytest.mark.parametrize(("prompt", "stream"), [(_PROMPT, False), ([*_PROMPT, END], True)])
def test_append(client: httpx.Client, tiny_model: TinyModel, prompt: list[int], stream: bool) -> None:
    appended = tiny_model.render([*_HISTORY, *_NEXT])[len(tiny_model.render(_HISTORY, False)) - 1 :]
    close = [] if prompt[-1] == END else [END]
    answer = client.post(_TOKENS, json={"tokens": prompt, "append_messages": _NEXT, "stream": stream})
    assert _ids(answer, stream)[0] == [*prompt, *close, *appended]
    assert _headers(answer) == {
        "source": "extended",
        "reused": str(len(prompt)),
        "appended": str(len(close) + len(appended)),
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_append_with_tools(client: httpx.Client, tiny_model: TinyModel, fields: dict[str, Any]) -> None:
    kwargs = fields.get("chat_template_kwargs", {})
    tools, add = fields.get("tools"), fields.get("add_generation_prompt", True)
    whole = tiny_model.render([*_HISTORY, *_NEXT], add, tools=tools, **kwargs)
    before = tiny_model.render(_HISTORY, False, tools=tools, **kwargs)
    request = {"prompt_ids": [*_PROMPT, END], "append_messages": _NEXT, **fields}
    answer = client.post(_TOKENS, json=request)
    assert _ids(answer, False)[0] == [*_PROMPT, END, *whole[len(before) - 1 :]]


_APPEND = {"prompt_ids": [1], "append_messages": _NEXT}
_BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt_ids", {"prompt_ids": []}),
    ("prompt_token_ids", {"prompt_token_ids": [-1]}),
    ("tokens", {"tokens": [1, VOCAB_SIZE]}),
    ("prompt_ids", {}),
    ("tokens", {"prompt_ids": [1], "tokens": [1]}),
    ("kv_transfer_params.prompt_token_ids", {"tokens": [1], "kv_transfer_params": {"prompt_token_ids": [1]}}),
    ("messages", {"prompt_ids": [1], "messages": _IMAGE}),
    ("append_messages", {"prompt_ids": [1], "append_messages": _IMAGE}),
    ("messages", {**_APPEND, "messages": [5]}),
    ("append_messages", {"prompt_ids": [1], "append_messages": []}),
    ("chat_template", {**_APPEND, "chat_template": "{{ messages }}"}),
    ("echo", {"prompt_ids": [1], "echo": True}),
    # an engine may give it an effect that appended ids cannot have
    ("chat_template_kwargs", {**_APPEND, "chat_template_kwargs": {"chat_template": "x"}}),
]


@pytest.mark.parametrize("param, fields", _BAD)
def test_bad_requests(client: httpx.Client, fake: FakeVllm, param: str, fields: dict[str, Any]) -> None:
    answer = client.post(_TOKENS, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", param)
    assert _headers(answer) == {}
    if VOCAB_SIZE not in fields.get("tokens", []):  # which only the engine knows
        assert not fake.from_clients()


def test_all_other_fields_arrive_byte_for_byte(client: httpx.Client, fake: FakeVllm) -> None:
    fields = {
        "model": '"tiny"',
        "temperature": "0.70",
        "seed": "123456789012345678901234567890",
        "logit_bias": '{ "5":-1e2 , "5": 3}',
        "tools": '[{"type":"function",\n"function":{"name":"\\u00e9"}}]',
        "response_format": '{"type": "json_schema", "json_schema": {"z": 1, "a": 2}}',
        "vendor_extension": "[1, [2], {}]",
        "user": "null",
    }
    body = ", ".join(f'"{name}" : {value}' for name, value in fields.items())
    answer = client.post(_TOKENS, content=f'{{"prompt_ids": [ 1,\t2 ], {body}}}'.encode())
    assert answer.status_code == 200
    arrived = fake.last().body
    for name, value in fields.items():
        assert f'"{name}":{value}'.encode() in arrived
    assert b'"prompt_token_ids":[1,2]' in arrived
    assert set(fake.last().json) == {*fields, "return_token_ids", "messages", "kv_transfer_params"}


def test_history_is_sent_as_context(client: httpx.Client, fake: FakeVllm) -> None:
    request = {"tokens": _PROMPT, "messages": _HISTORY, "append_messages": _NEXT}
    assert client.post(_TOKENS, json=request).status_code == 200
    assert fake.last().json["messages"] == _HISTORY + _NEXT


def test_first_turn_is_sent_unchanged(client: httpx.Client, fake: FakeVllm) -> None:
    """With images too: only a request with ids must have none."""
    messages = [*_HISTORY, *_IMAGE]
    client.post(_TOKENS, json={"messages": messages, "temperature": 0})
    requested = {"return_token_ids": True, "logprobs": True}
    assert fake.last().json == {"messages": messages, "temperature": 0, **requested}


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_hidden_with_the_reasoning(client: httpx.Client, fake: FakeVllm, stream: bool) -> None:
    fake.usual = Reply(message={"reasoning": "secret"})
    answer = client.post(_TOKENS, json={"prompt_ids": _PROMPT, "include_reasoning": False, "stream": stream})
    assert answer.status_code == 200
    for body in data_of(answer.content) if stream else [answer.json()]:
        assert body.get("prompt_token_ids") is None
        assert all(choice.get("token_ids") is None for choice in body["choices"])
    assert b"secret" not in answer.content


@pytest.mark.parametrize("body", [b'{"choices":[{"h', b"{]}", b'{"choices":[]} xx'])
def test_a_completion_that_is_no_json_is_an_error(client: httpx.Client, fake: FakeVllm, body: bytes) -> None:
    fake.usual = Reply(error=Canned(body, headers={"content-type": "application/json"}))
    answer = client.post(_TOKENS, json={"prompt_ids": _PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)
