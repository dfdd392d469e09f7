"""What a real vLLM and the proxy make of bad input: a 4xx error object that names the field, never a 500."""

import json
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import Served, every_spelling
from tests.campaign.real_vllm.test_token_route import PROMPT, ROUTE

BEYOND_CONTEXT = [5] * 9000
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
USER = [{"role": "user", "content": "Hi"}]

BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "empty": ({"prompt_ids": []}, 400, "prompt_ids"),
    "not a list": ({"prompt_ids": 5}, 400, "prompt_ids"),
    "an object": ({"prompt_ids": {}}, 400, "prompt_ids"),
    "a string": ({"tokens": "1 2"}, 400, "tokens"),
    "holds a bool": ({"prompt_ids": [1, True]}, 400, "prompt_ids"),
    "holds a float": ({"prompt_ids": [1, 2.5]}, 400, "prompt_ids"),
    "holds a string": ({"prompt_token_ids": [1, "2"]}, 400, "prompt_token_ids"),
    "holds null": ({"prompt_ids": [1, None]}, 400, "prompt_ids"),
    "holds a list": ({"prompt_ids": [[1]]}, 400, "prompt_ids"),
    "negative": ({"prompt_ids": [1, -2]}, 400, "prompt_ids"),
    "beyond the vocabulary": ({"prompt_ids": [1, 49152]}, 400, "prompt_ids"),
    "beyond any integer": ({"tokens": [1, 10**30]}, 400, "tokens"),
    "beyond the context": ({"prompt_ids": BEYOND_CONTEXT, "max_tokens": 1}, 400, "prompt_ids"),
    "nothing": ({}, 400, "prompt_ids"),
    "twice": ({"prompt_ids": PROMPT, "tokens": PROMPT}, 400, "tokens"),
    "append without ids": ({"append_messages": USER}, 400, "prompt_ids"),
    "append nothing": ({"prompt_ids": PROMPT, "append_messages": []}, 400, "append_messages"),
    "append no message": ({"prompt_ids": PROMPT, "append_messages": [{"x": 1}]}, 400, "append_messages"),
    "append an image": ({"prompt_ids": PROMPT, "append_messages": IMAGE}, 400, "append_messages"),
    "image with ids": ({"prompt_ids": PROMPT, "messages": IMAGE}, 400, "messages"),
    "unknown model": ({"model": "nope", "prompt_ids": PROMPT}, 404, "model"),
    "unknown model, streamed": ({"model": "nope", "prompt_ids": PROMPT, "stream": True}, 404, "model"),
    "a bad parameter": ({"prompt_ids": PROMPT, "temperature": "hot"}, 400, "temperature"),
    "echo": ({"prompt_ids": PROMPT, "echo": True}, 400, "echo"),
}


def check(answer: httpx.Response, status: int, param: str) -> None:
    """An OpenAI error object with this status and `param`."""
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert error["message"] and error["type"]
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_its_field(server: Served, case: str) -> None:
    body, status, param = BAD[case]
    with server.http() as http:
        check(http.post(ROUTE, json=body), status, param)


@every_spelling
def test_ids_are_checked_by_every_spelling(server: Served) -> None:
    with server.http() as http:
        for case in ("beyond the vocabulary", "beyond any integer", "beyond the context", "unknown model"):
            body, status, param = BAD[case]
            check(http.post(ROUTE, json=body), status, param)


@every_spelling
def test_context_error_has_the_words_that_clients_look_for(server: Served) -> None:
    with server.http() as http:
        error = http.post(ROUTE, json={"prompt_ids": BEYOND_CONTEXT, "max_tokens": 1}).json()["error"]
    assert "maximum context length" in error["message"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"prompt_ids=1", b"\xff\xfe", b""])
@pytest.mark.parametrize("route", [ROUTE, "/tokenize"])
def test_body_that_is_no_json_object(server: Served, route: str, content: bytes) -> None:
    with server.http() as http:
        answer = http.post(route, content=content, headers={"content-type": "application/json"})
    check(answer, 400, "body")


def test_body_over_the_limit(server: Served) -> None:
    body = json.dumps({"prompt_ids": PROMPT}).encode() + b" " * (64 * 2**20)
    with server.http() as http:
        check(http.post(ROUTE, content=body, headers={"content-type": "application/json"}), 413, "body")


TOKENIZE_BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "append without ids": ({"append_messages": USER}, 400, "prompt_ids"),
    "ids without append": ({"prompt_ids": PROMPT}, 400, "append_messages"),
    "negative": ({"prompt_ids": [-1], "append_messages": USER}, 400, "prompt_ids"),
    "beyond the vocabulary": ({"prompt_ids": [1, 49152], "append_messages": USER}, 400, "prompt_ids"),
    "unknown model": ({"prompt_ids": PROMPT, "append_messages": USER, "model": "nope"}, 404, "model"),
    "an image": ({"prompt_ids": PROMPT, "append_messages": IMAGE}, 400, "append_messages"),
    "a prefix without turns": ({"required_prefix_token_ids": PROMPT, "messages": USER}, 400, "messages"),
    "a prefix alone": ({"required_prefix_token_ids": PROMPT}, 400, "messages"),
    "a bad prefix": (
        {"required_prefix_token_ids": [1.5], "messages": USER},
        400,
        "required_prefix_token_ids",
    ),
}


@pytest.mark.parametrize("case", TOKENIZE_BAD)
def test_bad_input_of_tokenize(server: Served, case: str) -> None:
    body, status, param = TOKENIZE_BAD[case]
    with server.http() as http:
        check(http.post("/tokenize", json=body), status, param)
