"""Errors of responses: OpenAI's error objects, and the events by which Codex decides what to do."""

from typing import Any

import httpx
import openai
import pytest

from proxy.dialects.responses.errors import engine_error, failure
from tests.contract.dialects.responses.dialogue import Event, events_of, sdk
from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, error_body
from tests.support.tiny_model import END

SPLIT = (74, 71, 78, 78, 81, END)
_JSON = {"content-type": "application/json"}
_TOO_LONG = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, ..."


def _canned(status: int, message: str = "no", code: Any = None) -> Reply:
    return Reply(error=Canned(error_body(message, "X", None, code or status), status, _JSON))


def _stream(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": True, **fields})


def _failed(response: httpx.Response) -> Event:
    assert response.status_code == 200, response.text
    event = events_of(response.content)[-1]
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    error: Event = event["response"]["error"]
    return error


@pytest.mark.parametrize("reply", [_canned(400, _TOO_LONG), None], ids=["the engine's", "the proxy's"])
def test_a_context_that_is_full(client: httpx.Client, fake: FakeVllm, reply: Reply | None) -> None:
    """Codex knows it by the event's code; other clients by the status."""
    fields: dict[str, Any] = {} if reply else {"input": "hello there " * MAX_MODEL_LEN * 2}
    for stream in (True, False):
        if reply:
            fake.replies.append(reply)
        if stream:
            response = _stream(client, **fields)
            assert _failed(response)["code"] == "context_length_exceeded"
            kinds = [event["type"] for event in events_of(response.content)]
            assert kinds == ["response.created", "response.in_progress", "response.failed"]
        else:
            refused = client.post("/v1/responses", json={"model": "tiny", "input": "Hi", **fields})
            assert refused.status_code == 400
            assert "maximum context length" in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "input"


def test_an_error_of_the_engine_has_its_class(client: httpx.Client, fake: FakeVllm) -> None:
    for status, kind in ((400, openai.BadRequestError), (429, openai.RateLimitError)):
        fake.replies.append(_canned(status, "temperature must be non-negative"))
        with pytest.raises(kind, match="non-negative"):
            sdk(client).responses.create(model="tiny", input="Hi")


def test_a_stream_that_breaks(client: httpx.Client, fake: FakeVllm) -> None:
    """The response has failed: Codex tries again. The SDK yields both events."""
    fake.replies.append(Reply(SPLIT, break_at=3))
    blocks = _stream(client).content.split(b"\n\n")
    events = events_of(b"\n\n".join(blocks[:-2]) + b"\n\n")
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == (
        "response.failed",
        "server_error",
    )
    assert blocks[-2].startswith(b"event: error\n")
    fake.replies.append(Reply(SPLIT, break_at=3))
    kinds = [event.type for event in sdk(client).responses.create(model="tiny", input="Hi", stream=True)]
    assert kinds[-2:] == ["response.failed", "error"]
    fake.replies.append(Reply(SPLIT, break_at=3))
    with sdk(client).responses.stream(model="tiny", input="Hi") as stream, pytest.raises(RuntimeError):
        stream.get_final_response()


@pytest.mark.parametrize("field", [b"metadata", b"x"])
def test_bodies_that_are_not_utf8(client: httpx.Client, field: bytes) -> None:
    """Also in values that the response repeats, or that nobody reads."""
    body = b'{"model":"tiny","input":"Hi","%b":["\xff"]}' % field
    response = client.post("/v1/responses", content=body)
    assert response.status_code == 400 and "UTF-8" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "problem, code",
    [
        ((400, _TOO_LONG, None), "context_length_exceeded"),
        ((400, "x", "context_length_exceeded"), "context_length_exceeded"),
        ((400, "x", None), "invalid_prompt"),
        ((429, "x", "queue_full"), "rate_limit_exceeded"),
        ((503, "x", None), "server_error"),
        ((500, "x", None), "server_error"),
    ],
)
def test_codes_of_failures(problem: tuple[int, str, str | None], code: str) -> None:
    assert failure(*problem) == {"code": code, "message": problem[1]}


def test_error_objects_keep_the_code_of_the_engine() -> None:
    assert b'"code":"x"' in engine_error(409, "m", "x")
    assert b'"type":"BadRequestError"' in engine_error(409, "m", None)
    assert b'"type":"InternalServerError"' in engine_error(500, "m", None)
