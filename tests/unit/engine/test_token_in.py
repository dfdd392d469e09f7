import json
from typing import Any

import pytest

from tests.support.fake_vllm import error_body
from tokenproxy.base.fields import parse
from tokenproxy.base.http import BytesResponse
from tokenproxy.engine.protocol import TokenRequest
from tokenproxy.engine.token_in import chat_body, rename_errors, rename_param


def _request(body: str = "{}") -> TokenRequest:
    return TokenRequest(b"[1, 2]", parse(body.encode()), [], "tokens")


@pytest.mark.parametrize(
    "body, transfer",
    [
        ("{}", b'{"prompt_token_ids":[1, 2]}'),
        ('{"kv_transfer_params": null}', b'{"prompt_token_ids":[1, 2]}'),
        (
            '{"kv_transfer_params": {"do_remote_decode": true, "x": [1.0]}}',
            b'{"do_remote_decode":true,"x":[1.0],"prompt_token_ids":[1, 2]}',
        ),
    ],
)
def test_ids_are_added_to_the_clients_transfer_parameters(body: str, transfer: bytes) -> None:
    assert bytes(parse(chat_body(_request(body)))["kv_transfer_params"]) == transfer


def test_clients_messages_are_kept_and_a_placeholder_is_added() -> None:
    messages = '[{"role": "user", "content": "Hi"}]'
    assert bytes(parse(chat_body(_request(f'{{"messages": {messages}}}')))["messages"]) == messages.encode()
    assert json.loads(chat_body(_request()))["messages"] == [{"role": "user", "content": ""}]


_CONTEXT = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens."
)


@pytest.mark.parametrize(
    "message, param, expected_message, expected_param",
    [
        (
            "Token id 9 is out of vocabulary (parameter=kv_transfer_params.prompt_token_ids)",
            "kv_transfer_params.prompt_token_ids",
            "Token id 9 is out of vocabulary",
            "tokens",
        ),
        (f"{_CONTEXT} (parameter=input_tokens, value=5000)", "input_tokens", _CONTEXT, "tokens"),
        ("1 validation error", "body.temperature", "1 validation error", "temperature"),
        ("n must be at least 1 (parameter=n, value=0)", "n", "n must be at least 1", "n"),
    ],
)
def test_errors_name_the_clients_fields(
    message: str, param: str | None, expected_message: str, expected_param: str | None
) -> None:
    body = rename_param(error_body(message, "BadRequestError", param, 400), 400, "tokens")
    error = json.loads(body)["error"]
    assert (error["message"], error["param"]) == (expected_message, expected_param)


@pytest.mark.parametrize(
    "body, words",
    [
        (b"<html>Bad gateway</html>", "the engine returned status 500: <html>Bad gateway"),
        (b"", "the engine returned status 500: "),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"error": {"message": "too hot", "code": 4.5, "param": ["a"], "type": {}}}', "too hot"),
        (b'{"error": {"message": "too hot", "type": "BadGatewayError"}}', "too hot"),
    ],
)
def test_bodies_without_error_object_become_error_objects(body: bytes, words: str) -> None:
    error: dict[str, Any] = json.loads(rename_param(body, 500, "tokens"))["error"]
    assert error["message"].startswith(words)
    assert error["code"] == 500


async def test_rewritten_error_has_json_headers_and_a_success_is_unchanged() -> None:
    success = BytesResponse(200, [], b"{ }")
    assert await rename_errors(success, "tokens") is success
    headers = [(b"retry-after", b"7"), (b"content-length", b"999"), (b"content-type", b"text/plain")]
    response = await rename_errors(BytesResponse(429, headers, b"slow down"), "tokens")
    body = await response.read()
    assert sorted(response.headers) == [
        (b"content-length", str(len(body)).encode()),
        (b"content-type", b"application/json"),
        (b"retry-after", b"7"),
    ]
