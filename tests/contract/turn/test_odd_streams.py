"""Answers that an engine should not give: what the client gets is whole, or an error that says so."""

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, data_of
from tests.support.talk import CHAT, user

_TOKENS = f"{CHAT}/tokens"
_EVERYTHING = {"return_token_ids": True, "logprobs": True}
_DELTA = {"role": "assistant", "content": "h"}
_FIRST = {"index": 0, "delta": _DELTA, "token_ids": [74], "finish_reason": None}
_LAST = {"index": 0, "delta": {}, "token_ids": [2], "finish_reason": "stop"}
_DONE = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No unexpected exception of the proxy or of its server; asyncio may tell of earlier tests."""
    yield
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [each.getMessage() for each in errors if each.name.startswith(("tokenproxy", "uvicorn"))]


def _event(choice: object, indent: int | None = None) -> bytes:
    """An event with a chunk, whose data has several lines with `indent`."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    return (
        b"".join(b"data: %b\n" % line for line in json.dumps(chunk, indent=indent).encode().split(b"\n"))
        + b"\n"
    )


def _stream(fake: FakeVllm, client: httpx.Client, events: bytes, **fields: object) -> httpx.Response:
    fake.canned[CHAT] = Canned(events, 200, {"content-type": "text/event-stream"})
    return client.post(CHAT, json={"messages": [user("Hi")], "stream": True, **fields})


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_data_of_several_lines_passes_byte_for_byte(
    fake: FakeVllm, client: httpx.Client, newline: bytes
) -> None:
    events = b"event: chunk\nid: 1\n" + _event(_FIRST, 1) + b": ping\n\n" + _event(_LAST, 1)
    sent = events.replace(b"\n", newline)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    answer = _stream(fake, client, sent + _DONE.replace(b"\n", newline), **_EVERYTHING, stream_options=usage)
    assert answer.content == sent + _DONE


def test_a_complete_stream_without_done(fake: FakeVllm, client: httpx.Client) -> None:
    answer = _stream(fake, client, _event(_FIRST) + _event(_LAST))
    assert [chunk["choices"][0]["finish_reason"] for chunk in data_of(answer.content)] == [None, "stop"]
    assert b"[DONE]" not in answer.content


@pytest.mark.parametrize("end", [b"", b"data: {\n\n"])
def test_a_stream_that_ends_before_its_turn_ends_with_an_error(
    fake: FakeVllm, client: httpx.Client, end: bytes
) -> None:
    answer = _stream(fake, client, _event(_FIRST) + end)
    *_, last = data_of(answer.content)
    assert (last["error"]["type"], last["error"]["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in answer.content


def test_empty_stream_is_an_error_of_the_engine(fake: FakeVllm, client: httpx.Client) -> None:
    response = _stream(fake, client, b"")
    assert (response.status_code, response.headers["content-type"]) == (502, "application/json")
    assert "returned an empty stream" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, _TOKENS])
@pytest.mark.parametrize(
    "body, status",
    [
        ('{"choices": [{"message": {"content": "\\ud800"}, "token_ids": [NaN], "finish_reason": 7}]}', 200),
        ('{"choices": [{"index": 99999999999999999999, "message": {"tool_calls": {"a": 1}}}]}', 200),
        ('{"choices": ' + "[" * 2000 + "]" * 2000 + "}", 502),
        ("", 502),
    ],
    ids=range(4),
)
def test_malformed_responses_are_not_a_500(
    fake: FakeVllm, client: httpx.Client, path: str, body: str, status: int
) -> None:
    request = {"prompt_ids": [1, 74]} if path == _TOKENS else {"messages": [user("Hi")]}
    for fields in ({}, _EVERYTHING):
        fake.canned[CHAT] = Canned(body.encode(), 200, {"content-type": "application/json"})
        assert client.post(path, json={**request, **fields}).status_code in (200, status)
        events = f"data: {body.replace('message', 'delta')}\n\n".encode() + _DONE
        assert _stream(fake, client, events, **fields).status_code in (200, status)
