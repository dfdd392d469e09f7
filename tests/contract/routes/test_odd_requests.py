"""Requests that no client should send: each gets an answer, and none of them a 500 of the proxy.

`tests/campaign/routes` tries every value in every field.
"""

import json
import logging
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_proxy

_HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ODD = [
    *("null", "true", "-1", "1.5", "1e400", "NaN", "Infinity", "1" * 5000, "2147483648"),
    *("18446744073709551616", '""', '"a"', '"\\ud800"', '"\\u0000"', "[]", "[null]", "[[]]", "[{}]"),
    *("[2147483648]", "[true]", '["1"]', "{}", '{"a": 1}', "[" + "9" * 30 + "]"),
    *("[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500),
    *('[{"role": 1}]', '[{"role": "user", "content": NaN}]', '[{"role": "user", "content": [1]}]'),
    *('[{"role": "user", "content": "\\ud800"}]', '[{"role": "assistant", "tool_calls": {"a": 1}}]'),
    '[{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": 1, "arguments": "\\ud800"}}]}]',
    '[{"type": "function", "function": {"name": "\\ud800", "parameters": {"a": 1e400}}}]',
]
_CHAT = (
    *("messages", "model", "stream", "stream_options", "temperature", "tools", "tool_choice", "logprobs"),
    *("response_format", "chat_template_kwargs", "documents", "reasoning_effort", "return_token_ids"),
    *("add_generation_prompt", "continue_final_message", "required_prefix_token_ids", "include_reasoning"),
    *("truncate_prompt_tokens", "max_tokens", "echo"),
)
_IDS = ("prompt_ids", "tokens", "prompt_token_ids", "append_messages")
_APPEND = {"prompt_ids": [1, 74], "append_messages": _HI, "messages": [*_HI, {"role": "assistant"}]}
_FIELDS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "/v1/chat/completions": ([{"messages": _HI}], _CHAT),
    "/v1/chat/completions/tokens": ([{"prompt_ids": [1, 74]}, _APPEND], (*_CHAT, *_IDS)),
    "/tokenize": (
        [{"prompt": "Hi"}, {"messages": _HI}, _APPEND],
        ("messages", "model", "tools", "chat_template_kwargs", "required_prefix_token_ids", *_IDS),
    ),
    "/v1/sessions": ([{}, {"id": "known"}], ("id", "defaults", "overrides", "metadata")),
    "/v1/sessions/known/reward": ([{"reward": 1}], ("reward", "rewards", "turn")),
}
CASES = [
    (path, base, field) for path, (bases, fields) in _FIELDS.items() for base in bases for field in fields
]


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No unexpected exception, except those of the fake engine."""
    yield
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [message for message in found if "Error handling request" not in message] == []


@pytest.fixture(scope="module")
def talked(engine: FakeVllm) -> Iterator[httpx.Client]:
    """A client of a proxy that has a session with more turns than one look-up returns."""
    with run_proxy([engine], store="memory:") as client:
        headers = {"x-session-id": "known"}
        for last in range(40):
            body = {"prompt_ids": [1, 74, 60 + last % 20, 61 + last % 19]}
            assert client.post("/v1/chat/completions/tokens", json=body, headers=headers).status_code == 200
        yield client


def send_odd(
    client: httpx.Client, path: str, base: dict[str, Any], field: str, odd: str, session: bool
) -> None:
    """Send a request with an odd value in one field; it must get an answer."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in base.items() if name != field]
    body = f"{{{', '.join([*fields, f'{json.dumps(field)}: {odd}'])}}}".encode()
    answer = client.post(path, content=body, headers={"x-session-id": "known"} if session else {})
    assert "unexpected error in the proxy" not in answer.text, (path, field, odd[:100])
    assert answer.text != "Internal Server Error"


def test_odd_fields(talked: httpx.Client) -> None:
    chosen = random.Random(7)
    for path, base, field in CASES:
        for odd in chosen.sample(ODD, 3):
            send_odd(talked, path, base, field, odd, session=chosen.random() < 0.5)


@pytest.mark.parametrize("odd", ["2147483648", "18446744073709551616", "9" * 30])
@pytest.mark.parametrize("before", ["", "1,74,"])
def test_an_id_beyond_32_bits_in_a_long_session(talked: httpx.Client, before: str, odd: str) -> None:
    body = f'{{"prompt_ids": [{before}{odd}]}}'
    answer = talked.post("/v1/chat/completions/tokens", content=body, headers={"x-session-id": "known"})
    assert answer.status_code == 400
    assert "out of vocabulary" in answer.text or "digits" in answer.text or "beyond" in answer.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b"\xef\xbb\xbf{}", b"{}{}", b"\x00", b"NaN", b"[" * 100_000]
)
def test_bodies_that_are_not_objects_are_refused(talked: httpx.Client, body: bytes) -> None:
    for path in ("/v1/chat/completions/tokens", "/tokenize", "/v1/sessions/known/reward"):
        answer = talked.post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), path


def _raw(client: httpx.Client, *lines: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and answer of a request that no client library would send."""
    url = client.base_url
    with socket.create_connection((url.host, url.port or 80), timeout=20) as connection:
        rest = (b"host: 127.0.0.1", b"connection: close", b"content-length: %d" % len(body), b"", body)
        connection.sendall(b"\r\n".join([*lines, *rest]))
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.parametrize("path", [b"/v1/sessions", b"/v1/sessions/known/samples", b"/ready"])
def test_odd_queries(talked: httpx.Client, path: bytes) -> None:
    talked.post("/v1/sessions", json={"id": "short"})
    path = path.replace(b"known", b"short")
    values = [b"", b"NaN", b"1e400", b"inf", b"1" * 400, b"%ed%a0%80", b"%ff", b"%00", b"a:b", b"1:"]
    for name in (b"limit", b"before", b"shared", b""):
        for value in (*values, b"1:%ff", b"\xc3\xa9", b"a&a&&=", b"?#"):
            status, answer = _raw(talked, b"GET %s?%s=%s HTTP/1.1" % (path, name, value))
            assert status in (200, 400), answer


@pytest.mark.parametrize(
    "name", [b"x-session-id", b"idempotency-key", b"x-stainless-retry-count", b"content-type"]
)
def test_odd_headers(talked: httpx.Client, name: bytes) -> None:
    for value in (b"", b"  ", b"\xff", b"\xc3\xa9", b"a" * 5000, b"1e400", b"-1", b"a\tb"):
        for path in (b"/v1/chat/completions", b"/v1/chat/completions/tokens", b"/v1/sessions"):
            fields = {"prompt_ids": [1, 74]} if path.endswith(b"tokens") else {"messages": _HI}
            body = json.dumps(fields).encode()
            status, answer = _raw(talked, b"POST %s HTTP/1.1" % path, name + b": " + value, body=body)
            assert status in (200, 201, 400, 409), answer
