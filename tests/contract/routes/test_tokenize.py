from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm
from tests.support.tiny_model import END, VOCAB_SIZE, TinyModel
from tests.support.utils import run_proxy

_NEXT = [{"role": "user", "content": "And then?"}]
_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello there"}]
_PROMPT = [1, 74, 75]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello", "return_token_strs": True},
        {"messages": _TURNS, "add_generation_prompt": False},
        {"messages": _NEXT, "prompt_ids": None, "append_messages": None},
    ],
)
def test_vllms_own_contract(client: httpx.Client, fake: FakeVllm, body: dict[str, Any]) -> None:
    through = client.post("/tokenize", json=body)
    direct = httpx.post(f"{fake.url}/tokenize", json=body, trust_env=False)
    assert (through.status_code, through.content) == (200, direct.content)


@pytest.mark.parametrize("name", ["prompt_ids", "tokens", "prompt_token_ids"])
@pytest.mark.parametrize("prompt", [_PROMPT, [*_PROMPT, END], [5] * 10_000])
def test_append(client: httpx.Client, tiny_model: TinyModel, name: str, prompt: list[int]) -> None:
    appended = tiny_model.render([*_TURNS, *_NEXT])[len(tiny_model.render(_TURNS, False)) - 1 :]
    added = appended if prompt[-1] == END else [END, *appended]
    body = client.post("/tokenize", json={name: prompt, "append_messages": _NEXT}).json()
    assert body == {
        "tokens": prompt + added,
        "count": len(prompt) + len(added),
        "appended": len(added),
        "max_model_len": MAX_MODEL_LEN,
        "token_strs": None,
    }


def test_append_equals_what_the_token_route_sends(client: httpx.Client, fake: FakeVllm) -> None:
    request = {"prompt_ids": _PROMPT, "append_messages": _NEXT, "tools": [{"type": "function"}]}
    tokens = client.post("/tokenize", json=request).json()["tokens"]
    client.post("/v1/chat/completions/tokens", json=request)
    assert fake.last().json["kv_transfer_params"]["prompt_token_ids"] == tokens


def test_token_strings(client: httpx.Client) -> None:
    request = {"prompt_ids": [74, END], "append_messages": _NEXT, "return_token_strs": True}
    body = client.post("/tokenize", json=request).json()
    assert body["token_strs"][:4] == ["h", "<|im_end|>", "Ċ", "<|im_start|>"]
    assert len(body["token_strs"]) == body["count"]


@pytest.mark.parametrize(
    "sampled, kept",
    [
        ((74, 300, 75, END), (74, 300, 75, END)),
        ((74, 300, 75), (74, 300, 75, END)),
    ],
    ids=["stopped", "cut off"],
)
@pytest.mark.parametrize("more", [_NEXT, [*_NEXT, *_NEXT], []], ids=["one", "two", "none"])
def test_a_required_prefix_keeps_the_models_own_tokens(
    client: httpx.Client,
    tiny_model: TinyModel,
    sampled: tuple[int, ...],
    kept: tuple[int, ...],
    more: list[dict[str, Any]],
) -> None:
    prompt = tiny_model.render(_TURNS[:1])
    whole, before = tiny_model.render([*_TURNS, *more]), tiny_model.render(_TURNS, False)
    request = {"messages": [*_TURNS, *more], "required_prefix_token_ids": [*prompt, *sampled]}
    body = client.post("/tokenize", json=request).json()
    assert body["tokens"] == [*prompt, *kept, *whole[len(before) - 1 :]]
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == MAX_MODEL_LEN


def test_a_required_prefix_renders_up_to_the_last_assistant_turn(
    client: httpx.Client, fake: FakeVllm
) -> None:
    request = {
        "messages": [*_TURNS, *_NEXT],
        "required_prefix_token_ids": [1],
        "tools": [{"type": "function"}],
    }
    client.post("/tokenize", json=request)
    whole, before = (seen.json for seen in fake.seen("/tokenize"))
    assert whole == {"messages": request["messages"], "tools": request["tools"]}
    assert before == {"messages": _TURNS, "tools": request["tools"], "add_generation_prompt": False}


def test_a_required_prefix_with_token_strings(client: httpx.Client, tiny_model: TinyModel) -> None:
    prefix = [*tiny_model.render(_TURNS[:1]), 74, END]
    request = {"messages": _TURNS, "required_prefix_token_ids": prefix, "return_token_strs": True}
    body = client.post("/tokenize", json=request).json()
    assert body["token_strs"][len(prefix) - 2 : len(prefix)] == ["h", "<|im_end|>"]
    assert len(body["token_strs"]) == len(body["tokens"])


def test_a_required_prefix_of_another_question(client: httpx.Client, tiny_model: TinyModel) -> None:
    """The client edited a message that no model sampled."""
    edited = [{**_TURNS[0], "content": "Something else"}, *_TURNS[1:]]
    prefix = [*tiny_model.render(_TURNS[:1]), 74, END]
    answer = client.post("/tokenize", json={"messages": edited, "required_prefix_token_ids": prefix})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "prefix_mismatch")
    assert "send earlier messages as they were" in error["message"]


_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ids alone": ({"tokens": [1]}, "append_messages"),
    "append alone": ({"append_messages": _NEXT}, "prompt_ids"),
    "append of nothing": ({"tokens": [1], "append_messages": []}, "append_messages"),
    "no ids": ({"tokens": [], "append_messages": _NEXT}, "tokens"),
    "a boolean": ({"tokens": [True], "append_messages": _NEXT}, "tokens"),
    "out of vocabulary": ({"prompt_token_ids": [VOCAB_SIZE], "append_messages": _NEXT}, "prompt_token_ids"),
    "beyond any integer type": ({"tokens": [10**30, 1], "append_messages": _NEXT}, "tokens"),
    "an image": (
        {"tokens": [1], "append_messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "append_messages",
    ),
    "strings that are no boolean": (
        {"tokens": [1], "append_messages": _NEXT, "return_token_strs": "yes"},
        "return_token_strs",
    ),
    "prefix of nothing": ({"messages": _TURNS, "required_prefix_token_ids": []}, "required_prefix_token_ids"),
    "prefix of strings": (
        {"messages": _TURNS, "required_prefix_token_ids": ["1"]},
        "required_prefix_token_ids",
    ),
    "prefix out of vocabulary": (
        {"messages": _TURNS, "required_prefix_token_ids": [VOCAB_SIZE, END]},
        "required_prefix_token_ids",
    ),
    "prefix beyond any integer type": (
        {"messages": _TURNS, "required_prefix_token_ids": [2**40, END], "return_token_strs": True},
        "required_prefix_token_ids",
    ),
    "prefix without messages": ({"required_prefix_token_ids": [1]}, "messages"),
    "prefix without a turn": ({"messages": _NEXT, "required_prefix_token_ids": [1]}, "messages"),
    "messages that are none": ({"messages": "Hi", "required_prefix_token_ids": [1]}, "messages"),
}


@pytest.mark.parametrize("fields, param", _BAD.values(), ids=_BAD)
def test_bad_requests(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/tokenize", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_id_of_many_digits(client: httpx.Client) -> None:
    body = b'{"append_messages": [{"role": "user", "content": "a"}], "tokens": [%s, 1]}' % (b"9" * 5000)
    answer = client.post("/tokenize", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("model, status", [("tiny", 200), ("adapter", 200), ("other", 404)])
def test_the_model_is_checked(client: httpx.Client, model: str, status: int) -> None:
    answer = client.post("/tokenize", json={"model": model, "tokens": [1], "append_messages": _NEXT})
    assert answer.status_code == status
    if status == 404:
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_model_that_was_loaded_since(client: httpx.Client, fake: FakeVllm) -> None:
    fake.names = ["tiny", "new"]
    answer = client.post("/tokenize", json={"model": "new", "tokens": [1], "append_messages": _NEXT})
    assert answer.status_code == 200


def test_the_engines_refusal_of_a_history_is_passed_on(client: httpx.Client, fake: FakeVllm) -> None:
    error = b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
    fake.canned["/tokenize"] = Canned(error, 400, {"content-type": "application/json"})
    answer = client.post("/tokenize", json={"messages": _TURNS, "required_prefix_token_ids": [1]})
    assert (answer.status_code, answer.content) == (400, error)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
def test_an_engine_that_answers_nonsense(client: httpx.Client, fake: FakeVllm, body: bytes) -> None:
    fake.canned["/tokenize"] = Canned(body)
    answer = client.post("/tokenize", json={"messages": _TURNS, "required_prefix_token_ids": [1]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")


def test_a_history_that_the_template_rewrites(mortal: FakeVllm, tmp_path: Path) -> None:
    """The engine drops the assistant's text if a message follows: no cut is certain."""
    rewriting = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}"
        "{% endfor %}"
    )
    mortal.chat_template = rewriting
    (tmp_path / "rewriting.jinja").write_text(rewriting)
    with run_proxy([mortal], chat_template=tmp_path / "rewriting.jinja") as client:
        request = {"messages": [*_TURNS, *_NEXT], "required_prefix_token_ids": [1, END]}
        error = client.post("/tokenize", json=request).json()["error"]
    assert (error["code"], error["param"]) == ("template_unsupported", "required_prefix_token_ids")
