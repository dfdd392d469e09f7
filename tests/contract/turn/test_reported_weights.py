"""Spans of weights that an engine reports are recorded, and shown to those who asked for them."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, data_of
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_REPORTED = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
_SPANS = [["7", 0, 1], ["8", 1, 3]]
_EVERYTHING = {
    "return_token_ids": True,
    "logprobs": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model) as engine:
        engine.weight_versions = _REPORTED
        yield engine


@pytest.fixture(scope="module")
def client(engine: FakeVllm) -> Iterator[httpx.Client]:
    with run_proxy([engine]) as client:
        yield client


def _shown(answer: httpx.Response, *, stream: bool) -> list[object]:
    """The spans of the choices that a client got."""
    parts = list(data_of(answer.content)) if stream else [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    return [spans for choice in choices if (spans := choice.get("weight_versions")) is not None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", [False, True], ids=["not asked for", "asked for"])
@pytest.mark.parametrize("evidence", [{}, _EVERYTHING], ids=["text", "all evidence"])
def test_they_are_recorded_and_shown_on_request(
    client: httpx.Client, engine: FakeVllm, evidence: dict[str, object], asked: bool, stream: bool
) -> None:
    name = f"weights-{stream}-{asked}-{len(evidence)}"
    body = {"messages": [user(name)], "stream": stream, "return_weight_versions": asked, **evidence}
    if not stream:
        body.pop("stream_options", None)
    answer = client.post(CHAT, json=body, headers={"x-session-id": name})
    assert answer.status_code == 200, answer.text
    assert _shown(answer, stream=stream) == ([_REPORTED] if asked else [])
    assert engine.last().json["return_weight_versions"] is True
    [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
    assert sample["turns"][0]["weight_versions"] == _SPANS
    assert not sample["turns"][0].get("weights_uncertain", False)
    [turn] = client.get(f"/v1/sessions/{name}?ids=true").json()["turns"]
    assert (turn["weight_versions"], turn["segments"]) == (_SPANS, [])


def test_completions_request_them_too(client: httpx.Client, engine: FakeVllm) -> None:
    answer = client.post("/v1/completions", json={"prompt": [1, 74]}, headers={"x-session-id": "completions"})
    assert _shown(answer, stream=False) == []
    assert engine.last("/v1/completions").json["return_weight_versions"] is True
    [sample] = client.get("/v1/sessions/completions/samples").json()["samples"]
    assert sample["turns"][0]["weight_versions"] == _SPANS


def test_other_engines_are_not_asked(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as engine, run_proxy([engine]) as client:
        client.post(CHAT, json={"messages": [user("Hi")]}, headers={"x-session-id": "earlier"})
        assert "return_weight_versions" not in engine.last().json
