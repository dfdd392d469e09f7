"""Errors of responses: OpenAI's error objects, and the events by which Codex decides what to do."""

from typing import Any

import httpx
import pytest

from tests.contract.formats.responses.dialogue import events_of, sdk
from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, error_body
from tests.support.tiny_model import SPLIT
from tokenproxy.formats.responses.answer import response_failure

_TOO_LONG = f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, ..."


@pytest.mark.parametrize("engines", [True, False])
def test_a_context_that_is_full(client: httpx.Client, fake: FakeVllm, engines: bool) -> None:
    """Codex knows it by the event's code; other clients by the status."""
    fields: dict[str, Any] = {"model": "tiny", "input": "Hi"}
    if engines:
        canned = Canned(error_body(_TOO_LONG, "X", None, 400), 400, {"content-type": "application/json"})
        fake.replies.extend([Reply(error=canned)] * 2)
    else:
        fields["input"] = "hello there " * MAX_MODEL_LEN * 2
    events = events_of(client.post("/v1/responses", json={**fields, "stream": True}).content)
    kinds = [event["type"] for event in events]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    refused = client.post("/v1/responses", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "maximum context length" in refused.json()["error"]["message"]


@pytest.mark.usefixtures("resume_off")
def test_a_stream_that_breaks(client: httpx.Client, fake: FakeVllm) -> None:
    """The response has failed: Codex tries again. The SDK yields both events."""
    fake.replies.extend([Reply(SPLIT, break_at=3)] * 2)
    asked = {"model": "tiny", "input": "Hi", "stream": True}
    blocks = client.post("/v1/responses", json=asked).content.split(b"\n\n")
    events = events_of(b"\n\n".join(blocks[:-2]) + b"\n\n")
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert blocks[-2].startswith(b"event: error\n")
    kinds = [event.type for event in sdk(client).responses.create(**asked)]
    assert kinds[-2:] == ["response.failed", "error"]


@pytest.mark.parametrize(
    "status, code", [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_codes_of_failures(status: int, code: str) -> None:
    assert response_failure(status, "x", None) == {"code": code, "message": "x"}
