from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import MAX_MODEL_LEN, FakeVllm
from tests.support.talk import CHAT
from tests.support.tiny_model import END, VOCAB_SIZE, TinyModel

_NEXT = [{"role": "user", "content": "And then?"}]
_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello there"}]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello", "return_token_strs": True},
        {"messages": _TURNS, "add_generation_prompt": False},
    ],
)
def test_vllms_own_contract(client: httpx.Client, fake: FakeVllm, body: dict[str, Any]) -> None:
    through = client.post("/tokenize", json=body)
    direct = httpx.post(f"{fake.url}/tokenize", json=body, trust_env=False)
    assert (through.status_code, through.content) == (200, direct.content)


def test_append_equals_what_the_token_route_sends(client: httpx.Client, fake: FakeVllm) -> None:
    request = {"prompt_ids": [74, END], "append_messages": _NEXT, "tools": [{"type": "function"}]}
    body = client.post("/tokenize", json={**request, "return_token_strs": True}).json()
    assert (body["tokens"][:2], body["max_model_len"]) == ([74, END], MAX_MODEL_LEN)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 2 + body["appended"]
    assert body["token_strs"][:4] == ["h", "<|im_end|>", "Ċ", "<|im_start|>"]
    client.post("/v1/chat/completions/tokens", json=request)
    assert fake.last().json["kv_transfer_params"]["prompt_token_ids"] == body["tokens"]


@pytest.mark.parametrize("sampled", [(74, 300, 75, END), (74, 300, 75)])
def test_a_required_prefix_keeps_the_models_own_tokens(
    client: httpx.Client, tiny_model: TinyModel, sampled: tuple[int, ...]
) -> None:
    prompt, messages = tiny_model.render(_TURNS[:1]), [*_TURNS, *_NEXT]
    whole, before, prefix = tiny_model.render(messages), tiny_model.render(_TURNS, False), [*prompt, *sampled]
    request = {"messages": messages, "required_prefix_token_ids": prefix, "return_token_strs": True}
    body = client.post("/tokenize", json=request).json()
    assert body["tokens"] == [*prompt, 74, 300, 75, END, *whole[len(before) - 1 :]]
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])


_PREFIX = "required_prefix_token_ids"
_APPEND = {"tokens": [1], "append_messages": _NEXT}
_IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokens": [1]}, "append_messages"),
        ({"append_messages": _NEXT}, "prompt_ids"),
        ({**_APPEND, "append_messages": [_IMAGE]}, "append_messages"),
        ({**_APPEND, "tokens": [VOCAB_SIZE]}, "tokens"),
        ({**_APPEND, "tokens": [10**30, 1]}, "tokens"),
        ({**_APPEND, "return_token_strs": "yes"}, "return_token_strs"),
        ({"messages": [*_TURNS, *_NEXT], _PREFIX: []}, _PREFIX),
        ({"messages": _TURNS, _PREFIX: [1]}, "messages"),
        ({"messages": [*_TURNS, *_NEXT], _PREFIX: [1], "chat_template": "x"}, "chat_template"),
        ({"messages": _NEXT, _PREFIX: [1]}, "messages"),
    ],
)
def test_bad_requests(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/tokenize", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_model_is_checked_and_may_have_been_loaded_since(client: httpx.Client, fake: FakeVllm) -> None:
    fake.names = ["tiny", "new"]
    models = ("tiny", "adapter", "new", "other")
    answers = [client.post("/tokenize", json={**_APPEND, "model": model}) for model in models]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404]
    refused = client.post(CHAT, json={"messages": _NEXT, "model": "other"})
    assert refused.json()["error"] == answers[-1].json()["error"]
