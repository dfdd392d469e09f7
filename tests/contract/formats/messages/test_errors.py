"""Errors have Anthropic's envelope, and the words and headers on which its clients act."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, error_body
from tests.support.talk import user
from tests.support.utils import Pair, run_proxy
from tokenproxy.base.errors import (
    ApiError,
    EngineBroken,
    Overloaded,
    Unsupported,
    anthropic_error,
    send_error,
)
from tokenproxy.cli.key import add_key

_PATH = "/v1/messages"
_BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [user("Hi")]}


def _error(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error" and set(body) == {"type", "error"}
    assert body["error"]["type"] == kind
    assert response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def test_requests_that_are_refused(mortal: FakeVllm, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    reader = {"x-api-key": add_key(file, "reader", ["read"], "all")}
    settings: Any = {"api_key": ["k"], "api_key_file": file, "body_limit_bytes": 500, "store": "memory:"}
    with run_proxy([mortal], **settings) as client:
        for path in (f"{_PATH}?beta=true", f"{_PATH}/count_tokens", f"/sessions/s{_PATH}"):
            assert "X-API-Key" in _error(client.post(path, json=_BODY), 401, "authentication_error")
            forbidden = client.post(path, json=_BODY, headers=reader)
            assert "scope" in _error(forbidden, 403, "permission_error")
            large = client.post(path, json={**_BODY, "x": "y" * 500}, headers={"x-api-key": "k"})
            assert "body_limit_bytes" in _error(large, 413, "request_too_large")
            wrong = {**_BODY, "messages": [*_BODY["messages"], {"role": "user", "content": [{"type": "x"}]}]}
            refused = client.post(path, json=wrong, headers={"x-api-key": "k"})
            message = _error(refused, 400, "invalid_request_error")
            assert message.startswith("messages[1].content[0].type: ")
            assert client.post(path, json=_BODY, headers={"authorization": "Bearer k"}).is_success
        assert client.head("/", headers={"x-api-key": "k"}).is_success


@pytest.mark.parametrize(("turn", "stream"), [(0, False), (1, True)])
def test_a_prompt_that_is_too_long(pair: Pair, turn: int, stream: bool) -> None:
    """Claude Code compacts the conversation when it reads these words, and these numbers."""
    messages = list(_BODY["messages"])
    if turn:
        answer = pair.client.post(_PATH, json=_BODY).json()
        messages.append({"role": "assistant", "content": answer["content"]})
    body = {**_BODY, "messages": [*messages, user("x y " * MAX_MODEL_LEN)], "stream": stream}
    message = _error(pair.client.post(_PATH, json=body), 400, "invalid_request_error")
    words, _, engine = message.partition(" maximum. ")
    count, most = words.removeprefix("prompt is too long: ").split(" tokens > ")
    assert int(most) == MAX_MODEL_LEN < int(count)
    assert str(MAX_MODEL_LEN) in engine
    counted = pair.client.post(f"{_PATH}/count_tokens", json=body)
    assert counted.json()["input_tokens"] > MAX_MODEL_LEN


@pytest.mark.parametrize(
    "message, count",
    [
        ("This model's maximum context length is 80 tokens. But your prompt contains 900 characters", 81),
        ("The decoder prompt (length 99) is longer than the maximum model length of 80.", 99),
        ("something else", 0),
    ],
)
def test_the_wording_of_engines(message: str, count: int) -> None:
    error = json.loads(anthropic_error(400, message))["error"]
    said = f"prompt is too long: {count} tokens > 80 maximum. " if count else ""
    assert error == {"type": "invalid_request_error", "message": said + message}


@pytest.mark.parametrize(
    "status, kind", [(403, "permission_error"), (429, "rate_limit_error"), (500, "api_error")]
)
def test_an_error_of_the_engine(pair: Pair, status: int, kind: str) -> None:
    canned = Canned(error_body("no", "X", None, status), status, {"content-type": "application/json"})
    pair.fake.replies.extend([Reply(error=canned)] * 2)
    assert _error(pair.client.post(_PATH, json=_BODY), status, kind) == "no"


def test_an_error_in_place_of_a_chunk_ends_the_stream(pair: Pair) -> None:
    failed = error_body("the engine is dead", "InternalServerError", None, 500)
    chunk = json.dumps({"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}}]}).encode()
    body = b"data: " + chunk + b"\n\ndata: " + failed + b"\n\ndata: [DONE]\n\n"
    pair.fake.canned["/v1/chat/completions"] = Canned(body, 200, {"content-type": "text/event-stream"})
    content = pair.client.post(_PATH, json={**_BODY, "stream": True}).content
    last = content.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert last.startswith(b"event: error") and b"the engine is dead" in last


@pytest.mark.parametrize(
    "error, again", [(Unsupported, b"false"), (Overloaded, b"true"), (EngineBroken, None)]
)
async def test_whether_to_try_again(error: type[ApiError], again: bytes | None) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for path in (_PATH, "/v1/chat/completions"):
        await send_error(send, error("no"), path)
    assert dict(sent[0]["headers"]).get(b"x-should-retry") == again
    assert b"x-should-retry" not in dict(sent[2]["headers"])
