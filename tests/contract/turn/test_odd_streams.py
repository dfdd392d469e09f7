"""Answers that an engine should not give: what the client gets is whole, or an error that says so."""

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, data_of

_CHAT, _TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
_HI = [{"role": "user", "content": "Hi"}]
_STREAM = {"content-type": "text/event-stream"}
_EVERYTHING = {"return_token_ids": True, "logprobs": True}
_FIRST = {
    "index": 0,
    "delta": {"role": "assistant", "content": "h"},
    "token_ids": [74],
    "finish_reason": None,
}
_LAST = {"index": 0, "delta": {}, "token_ids": [2], "finish_reason": "stop"}
_COUNTED = {"usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}}


@pytest.fixture(autouse=True)
def nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No unexpected exception."""
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def _chunk(choice: object) -> bytes:
    return json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}).encode()


def _stream(fake: FakeVllm, client: httpx.Client, events: bytes, **fields: object) -> httpx.Response:
    fake.canned[_CHAT] = Canned(events, 200, _STREAM)
    return client.post(_CHAT, json={"messages": _HI, "stream": True, **fields})


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_data_of_several_lines_passes_byte_for_byte(
    fake: FakeVllm, client: httpx.Client, newline: bytes
) -> None:
    first, last = (json.dumps(json.loads(_chunk(choice)), indent=1).encode() for choice in (_FIRST, _LAST))
    blocks = [
        b"event: chunk\nid: 1\n" + b"".join(b"data: " + line + b"\n" for line in first.split(b"\n")) + b"\n",
        b": ping\n\n",
        b"".join(b"data:" + line + b"\n" for line in last.split(b"\n")) + b"\n",
        b"data: [DONE]\n\n",
    ]
    sent = b"".join(blocks).replace(b"\n", newline)
    fields = {**_EVERYTHING, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer = _stream(fake, client, sent, **fields)
    assert answer.content == sent[: -len(b"data: [DONE]") - 2 * len(newline)] + b"data: [DONE]\n\n"


def test_data_of_several_lines_is_redacted_whole(fake: FakeVllm, client: httpx.Client) -> None:
    pretty = json.dumps(json.loads(_chunk(_FIRST)), indent=1).encode()
    sent = b"event: chunk\n" + b"".join(b"data: " + line + b"\n" for line in pretty.split(b"\n")) + b"\n"
    answer = _stream(fake, client, sent + b"data: " + _chunk(_LAST) + b"\n\ndata: [DONE]\n\n")
    first, _, done, end = answer.content.split(b"\n\n")
    kind, *lines = first.split(b"\n")
    assert kind == b"event: chunk" and all(line.startswith(b"data: ") for line in lines)
    [choice] = json.loads(b"\n".join(line[6:] for line in lines))["choices"]
    assert (choice["delta"], choice["token_ids"]) == (_FIRST["delta"], None)
    assert (done, end) == (b"data: [DONE]", b"")


@pytest.mark.parametrize("fields", [{}, _EVERYTHING], ids=["hidden", "shown"])
def test_a_complete_stream_without_done(
    fake: FakeVllm, client: httpx.Client, fields: dict[str, object]
) -> None:
    events = b"data: " + _chunk(_FIRST) + b"\n\ndata: " + _chunk(_LAST) + b"\n\n"
    answer = _stream(fake, client, events, **fields)
    chunks = list(data_of(answer.content))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert b"[DONE]" not in answer.content


@pytest.mark.parametrize("end", [b"", b"data: {\n\n"])
def test_a_stream_that_ends_before_its_turn_ends_with_an_error(
    fake: FakeVllm, client: httpx.Client, end: bytes
) -> None:
    answer = _stream(fake, client, b"data: " + _chunk(_FIRST) + b"\n\n" + end)
    *_, last = data_of(answer.content)
    assert (last["error"]["type"], last["error"]["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in answer.content


def test_empty_stream_is_an_error_of_the_engine(fake: FakeVllm, client: httpx.Client) -> None:
    response = _stream(fake, client, b"")
    assert (response.status_code, response.headers["content-type"]) == (502, "application/json")
    assert "returned an empty stream" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, _EVERYTHING], ids=["hidden", "shown"])
@pytest.mark.parametrize("path", [_CHAT, _TOKENS])
@pytest.mark.parametrize(
    "body",
    [
        '{"choices": null}',
        "{}",
        '{"choices": {}}',
        '{"choices": [null]}',
        '{"choices": [1, {}]}',
        '{"choices": [{"message": null}]}',
        '{"choices": [{"delta": 5, "finish_reason": "stop"}]}',
        '{"choices": [{"message": {"content": "\\ud800"}, "token_ids": [NaN], "finish_reason": 7}]}',
        '{"choices": [{"index": 99999999999999999999, "message": {"tool_calls": {"a": 1}}}]}',
        '{"choices": [{"logprobs": {"content": [{"logprob": -1e999}]}, "token_ids": [4294967296]}]}',
        '{"usage": [], "prompt_token_ids": {"a": 1}, "choices": [{}]}',
        '{"usage": {"completion_tokens": -1}, "prompt_token_ids": [1.5], "choices": []}',
        '{"error": null, "choices": []}',
        "null",
        "[]",
        "7",
        '"text"',
        "[" * 2000 + "]" * 2000,
        '{"choices": ' + "[" * 2000 + "]" * 2000 + "}",
        "",
    ],
    ids=lambda body: body[:40] or "nothing",
)
def test_malformed_responses_are_not_a_500(
    fake: FakeVllm, client: httpx.Client, path: str, fields: dict[str, object], stream: bool, body: str
) -> None:
    text = body.replace('"message"', '"delta"') if stream else body
    request = {"prompt_ids": [1, 74]} if path == _TOKENS else {"messages": _HI}
    if stream:
        fake.canned[_CHAT] = Canned(f"data: {text}\n\ndata: [DONE]\n\n".encode(), 200, _STREAM)
    else:
        fake.canned[_CHAT] = Canned(text.encode(), 200, {"content-type": "application/json"})
    answer = client.post(path, json={**request, **fields, "stream": stream})
    assert answer.status_code in ((200,) if stream else (200, 502))
    if path == _CHAT and not stream and answer.status_code == 200:  # the other is not recorded here
        assert answer.content.startswith(b"{")
