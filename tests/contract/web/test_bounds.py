"""What a request's fields may hold: no request stops the others, or fills the memory."""

import json
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tokenproxy.formats.bounds import check_bounds

_HI = [{"role": "user", "content": "Hi"}]
_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_MANY: list[Any] = [[]] * 300_000
_TOOL = {"type": "function", "name": "look", "description": "d" * 1000}
_TOOLS = [_TOOL] * 2100


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
    assert not [seen for seen in fake.requests if seen.method == "POST"]


def test_long_texts_and_lists_of_ids_are_not_bounded() -> None:
    text = json.dumps([{"name": "x", "values": [1, 2, 3]}] * 100_000)
    for body in ({"messages": [{"role": "user", "content": text}]}, {"prompt_ids": [7] * 2_000_000}):
        check_bounds(json.dumps(body).encode())
