"""The token route as an engine sees it whose chat route takes ids."""

from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_proxy

_TOKENS = "/v1/chat/completions/tokens"
_PROMPT = [1, 74, 75]
_HISTORY = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hi"}]
_NEXT = [{"role": "user", "content": "And then?"}]
_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


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
