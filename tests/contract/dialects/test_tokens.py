from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, data_of
from tests.support.tiny_model import END, HI, VOCAB_SIZE, TinyModel
from tests.support.utils import EVERY_SPELLING, run_proxy
from tokenization import ChatTokenizer

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
@pytest.mark.parametrize("name", ["prompt_ids", "tokens", "prompt_token_ids"])
def test_ids_in_and_ids_out(client: httpx.Client, name: str) -> None:
    answer = client.post(_TOKENS, json={name: _PROMPT})
    assert answer.status_code == 200
    assert _ids(answer, False) == (_PROMPT, [*HI, END])
    assert _headers(answer) == {"source": "given", "reused": "3", "appended": "0", "reason": "ids_given"}


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [_PROMPT, [*_PROMPT, END]])
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
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_append_renders_with_the_requests_tools_and_arguments(
    client: httpx.Client, tiny_model: TinyModel, fields: dict[str, Any]
) -> None:
    kwargs = {"enable_thinking": False} if "reasoning_effort" in fields else {}
    kwargs |= fields.get("chat_template_kwargs", {})
    tools, add = fields.get("tools"), fields.get("add_generation_prompt", True)
    whole = tiny_model.render([*_HISTORY, *_NEXT], add, tools=tools, **kwargs)
    before = tiny_model.render(_HISTORY, False, tools=tools, **kwargs)
    request = {"prompt_ids": [*_PROMPT, END], "append_messages": _NEXT, **fields}
    answer = client.post(_TOKENS, json=request)
    assert _ids(answer, False)[0] == [*_PROMPT, END, *whole[len(before) - 1 :]]


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("requested, expected", [(None, True), (True, True), (False, False)])
def test_return_token_ids(client: httpx.Client, requested: bool | None, expected: bool, stream: bool) -> None:
    request = {"prompt_ids": _PROMPT, "return_token_ids": requested, "stream": stream}
    answer = client.post(_TOKENS, json=request)
    chunks = list(data_of(answer.content)) if stream else [answer.json()]
    assert any(chunk.get("prompt_token_ids") for chunk in chunks) is expected
    assert any(choice.get("token_ids") for c in chunks for choice in c["choices"]) is expected


_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"prompt_ids": []}, "prompt_ids"),
    "a boolean id": ({"tokens": [1, True]}, "tokens"),
    "a float id": ({"tokens": [1, 2.5]}, "tokens"),
    "a negative id": ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    "out of vocabulary": ({"tokens": [1, VOCAB_SIZE]}, "tokens"),
    "nothing": ({}, "prompt_ids"),
    "twice": ({"prompt_ids": [1], "tokens": [1]}, "tokens"),
    "twice, in vLLM's own place": (
        {"tokens": [1], "kv_transfer_params": {"prompt_token_ids": [1]}},
        "kv_transfer_params.prompt_token_ids",
    ),
    "an image with ids": ({"prompt_ids": [1], "messages": _IMAGE}, "messages"),
    "an image to append": ({"prompt_ids": [1], "append_messages": _IMAGE}, "append_messages"),
    "a part of no type": (
        {"prompt_ids": [1], "messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
        "messages",
    ),
    "a history that is none": ({"prompt_ids": [1], "messages": [5], "append_messages": _NEXT}, "messages"),
    "messages that are none": ({"prompt_ids": [1], "messages": "Hi"}, "messages"),
    "append without ids": ({"append_messages": _NEXT}, "prompt_ids"),
    "append of nothing": ({"prompt_ids": [1], "append_messages": []}, "append_messages"),
    "append of a text": ({"prompt_ids": [1], "append_messages": "Hi"}, "append_messages"),
    "append with a template": (
        {"prompt_ids": [1], "append_messages": _NEXT, "chat_template": "{{ messages }}"},
        "chat_template",
    ),
    "append that continues": (
        {"prompt_ids": [1], "append_messages": _NEXT, "continue_final_message": True},
        "continue_final_message",
    ),
    "echo": ({"prompt_ids": [1], "echo": True}, "echo"),
}


@pytest.mark.parametrize("fields, param", _BAD.values(), ids=_BAD)
def test_bad_requests(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post(_TOKENS, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "BadRequestError")
    assert error["code"] in (400, "no_images")
    assert error["param"] == param
    assert _headers(answer) == {}


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools"])
def test_arguments_of_the_renderer_are_refused_as_template_variables(client: httpx.Client, name: str) -> None:
    """An engine may give them effects that appended ids cannot have."""
    request = {"prompt_ids": [1], "append_messages": _NEXT, "chat_template_kwargs": {name: "x"}}
    answer = client.post(_TOKENS, json=request)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "name", sorted({*signature(ChatTokenizer.continuation).parameters} - {"self", "tools"})
)
def test_variables_of_a_template_may_have_any_other_name(client: httpx.Client, name: str) -> None:
    """Those of our own functions too."""
    request = {"prompt_ids": [1], "append_messages": _NEXT, "chat_template_kwargs": {name: "x"}}
    answer = client.post(_TOKENS, json=request)
    assert (answer.status_code, answer.headers["x-prompt-source"]) == (200, "extended")


@pytest.mark.parametrize("name", ["messages", "append_messages", "kv_transfer_params"])
def test_values_that_are_nested_too_deeply(client: httpx.Client, name: str) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    body = f'{{"prompt_ids": [1], "{name}": {deep}}}'
    assert client.post(_TOKENS, content=body.encode()).status_code == 400


def test_nothing_of_a_bad_request_reaches_the_engine(client: httpx.Client, fake: FakeVllm) -> None:
    client.post(_TOKENS, json={"prompt_ids": [True]})
    client.post(_TOKENS, json={"prompt_ids": [1], "messages": _IMAGE})
    assert not [seen for seen in fake.requests if seen.method == "POST"]


def test_all_other_fields_arrive_byte_for_byte(client: httpx.Client, fake: FakeVllm) -> None:
    fields = {
        "model": '"tiny"',
        "temperature": "0.70",
        "seed": "123456789012345678901234567890",
        "logit_bias": '{ "5":-1e2 , "5": 3}',
        "tools": '[{"type":"function",\n"function":{"name":"\\u00e9"}}]',
        "response_format": '{"type": "json_schema", "json_schema": {"z": 1, "a": 2}}',
        "logprobs": "true",
        "vendor_extension": "[1, [2], {}]",
        "priority": "-0",
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


@pytest.mark.parametrize(
    "history, append, arrives",
    [
        (None, _NEXT, [{"role": "user", "content": ""}]),
        (_HISTORY, None, _HISTORY),
        (_HISTORY, _NEXT, _HISTORY + _NEXT),
    ],
)
def test_history_is_sent_as_context(
    client: httpx.Client, fake: FakeVllm, history: object, append: object, arrives: object
) -> None:
    request = {"tokens": _PROMPT, "messages": history, "append_messages": append}
    assert client.post(_TOKENS, json=request).status_code == 200
    sent = fake.last().json
    assert sent["messages"] == arrives
    assert sent["kv_transfer_params"]["prompt_token_ids"][:3] == _PROMPT
    assert "append_messages" not in sent


def test_first_turn_is_sent_unchanged(client: httpx.Client, fake: FakeVllm) -> None:
    """With images too: only a request with ids must have none."""
    messages = [*_HISTORY, *_IMAGE]
    client.post(_TOKENS, json={"messages": messages, "temperature": 0})
    requested = {"return_token_ids": True, "logprobs": True}
    assert fake.last().json == {"messages": messages, "temperature": 0, **requested}


def test_an_engine_with_another_template(mortal: FakeVllm, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}")
    with run_proxy([mortal], chat_template=template) as client:
        refused = client.post(_TOKENS, json={"tokens": _PROMPT, "append_messages": _NEXT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "tokenizer_mismatch")
        assert client.post(_TOKENS, json={"tokens": _PROMPT}).status_code == 200
