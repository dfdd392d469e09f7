"""What a request's fields may hold: no request stops the others, or fills the memory."""

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tokenproxy.formats.bounds import _outside_texts, check_bounds

_HI = [{"role": "user", "content": "Hi"}]
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_MANY: list[Any] = [[]] * 300_000
_TOOL = {"type": "function", "name": "look", "description": "d" * 1000}
_TOOLS = [_TOOL] * 2100
_TEXTS, _NUMBERS = ["aa"] * 110_000, [300] * 110_000
_MESSAGE = {"type": "message", **_HI[0]}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (_CHAT, {"messages": _HI, "tools": [{"type": "function", "function": _TOOL}] * 2100}, 413, "tools"),
        (_CHAT, {"messages": _HI, "chat_template_kwargs": {"a": _MANY}}, 413, "chat_template_kwargs"),
        (_CHAT, {"messages": [{**_HI[0], "x": _MANY * 4}]}, 413, "messages"),
        (_RESPONSES, {"input": "Hi", "tools": _TOOLS}, 413, "tools"),
        (_RESPONSES, {"input": [_MANY * 4], "model": "tiny"}, 413, "input"),
        ("/v1/messages", {"messages": _HI, "max_tokens": 1, "tools": _TOOLS}, 413, "tools"),
        ("/tokenize", {"messages": _HI, "tools": _TOOLS}, 413, "tools"),
        (_CHAT, {"messages": _HI, "model": "m" * 2**22}, 413, "model"),
        (_CHAT, {"messages": [{**_HI[0], "content": _TEXTS}]}, 413, "messages"),
        (_CHAT, {"messages": _HI, **{f"k{n}": 1 for n in range(210_000)}}, 413, "body"),
        (f"{_CHAT}/tokens", {"prompt_ids": [1], "images": _TEXTS}, 413, "images"),
        (f"{_CHAT}/tokens", {"prompt_ids": [1], "append_messages": _TEXTS}, 413, "append_messages"),
        (f"{_CHAT}/tokens", {"prompt_ids": [7] * 2_000_002}, 413, "prompt_ids"),
        (_RESPONSES, {"input": "Hi", "include": _TEXTS}, 413, "include"),
        (_RESPONSES, {"input": [{**_MESSAGE, "x": _TEXTS}]}, 413, "input"),
        (_RESPONSES, {"input": [{**_MESSAGE, "x": _NUMBERS}]}, 413, "input"),
        ("/v1/messages", {"messages": _HI, "max_tokens": 1, "stop_sequences": _TEXTS}, 413, "stop_sequences"),
        ("/generate/", {"prompts": _TEXTS}, 413, "prompts"),
        ("/generate/", {"prompts": ["a"], "images": [_TEXTS]}, 413, "images"),
        ("/v1/completions", {"prompt": [[1]] * 4097}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 4097}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, 2**31]}, 400, "prompt"),
        (f"{_CHAT}/tokens", {"prompt_ids": [1, 2**31]}, 400, "prompt_ids"),
        ("/v1/sessions", {"metadata": {"a": "x" * 2**20}}, 413, "body"),
    ],
)
def test_what_holds_too_much_is_refused_by_its_field(
    client: httpx.Client, fake: FakeVllm, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert field in (error.get("param"), *error["message"].split("`"))
    assert not fake.from_clients()


@pytest.mark.parametrize("path", [_CHAT, "/v1/messages", _RESPONSES, "/v1/sessions", "/tokenize"])
def test_a_compressed_body_is_refused_as_such(client: httpx.Client, fake: FakeVllm, path: str) -> None:
    body = b'{"messages": [], "input": "Hi"}'
    answer = client.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "Content-Encoding" in answer.json()["error"]["message"] and not fake.from_clients()
    assert ("type" in answer.json()) == (path == "/v1/messages")
    assert client.post(path, content=body, headers={"content-encoding": "identity"}).status_code != 415


def test_long_names_are_shortened_in_errors(client: httpx.Client) -> None:
    body = {"prompt_ids": [1], "append_messages": _HI, "model": "m" * 100_000}
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 404 and len(answer.content) < 5000
    assert answer.json()["error"]["message"].endswith("mmm` does not exist.")


def test_long_texts_and_lists_of_ids_are_not_bounded() -> None:
    text = json.dumps([{"name": "x", "values": [1, 2, 3]}] * 100_000)
    ids = {"prompt_token_ids": [12345] * 100_000, "generation_token_ids": [1] * 1000}
    for body in (
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [{"role": "user", "content": '\\",[{:' * 200_000}]},
        {"messages": [{"role": "assistant", "content": "x", **ids}] * 10},
        {"messages": [_HI[0]] * 16_000},
        {"prompt_ids": [7] * 2_000_000},
        {"prompt": [7] * 1_000_000},
        {"prompts": [[7] * 4000] * 400},
        {"messages": _HI, "allowed_token_ids": list(range(200_000))},
        {"messages": _HI, "logit_bias": {f"{n}": 1 for n in range(90_000)}},
    ):
        check_bounds(json.dumps(body).encode())


def test_marks_in_texts_do_not_count_wherever_a_part_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ['a","b', "\\", '\\"', "\\\\", "é,\u0022", "[{:", ""]
    value = json.dumps([{text: [text, index]} for index, text in enumerate(texts * 3)]).encode()
    for size in (1, 2, 3, 7, 64, 10_000):
        monkeypatch.setattr("tokenproxy.formats.bounds._PART", size)
        outside = b"".join(_outside_texts(value))
        assert [outside.count(mark) for mark in b",:[{"] == [41, 21, 22, 21], size
