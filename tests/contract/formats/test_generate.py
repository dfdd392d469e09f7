"""Generate: tokens in, tokens out, with weight versions and sampling masks; other fields untouched."""

import re
from typing import Any

import httpx
import pytest

from tests.contract.formats.test_completions import (
    every_way,
    fresh,
    in_session,
    same_as_engine,
    samples,
    turns,
)
from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant
from tests.support.tiny_model import END, HI

ROUTE = "/inference/v1/generate"
Body = dict[str, Any]
_SAMPLED = [*HI, END]
_MASK = ((74, 5), (75,), (2, 6, 7))

pytestmark = pytest.mark.parametrize("pair", [Variant.SCALE_OUT], indirect=True, ids=str)


def _asked(**sampling: Any) -> Body:
    return {"token_ids": fresh(), "sampling_params": {"temperature": 0.7, **sampling}}


@every_way
def test_ids_are_recorded_with_weights_and_masks(client: httpx.Client, fake: FakeVllm, stream: bool) -> None:
    headers, body = in_session(), {**_asked(routed_experts_prompt_start=4), "stream": stream}
    fake.replies.append(Reply(mask=_MASK, routed_experts="k05VTVBZ"))
    answer = client.post(ROUTE, json=body, headers=headers)
    assert answer.headers["x-prompt-source"] == "given"
    [sample] = samples(client, headers["x-session-id"])
    assert (sample["prompt_ids"], sample["completion_ids"]) == (body["token_ids"], _SAMPLED)
    assert sample["logprobs"] == [-token / 8 for token in _SAMPLED]
    [turn] = sample["turns"]
    assert turn["weight_versions"] == [["7", 0, 3]]
    assert turn["sampling_mask"] == [list(kept) for kept in _MASK]
    assert (turn["routed_experts"], turn["routed_experts_start"]) == ("k05VTVBZ", 4)
    assert turn["temperature"] == 0.7


@every_way
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_client_gets_what_it_requested(
    client: httpx.Client, fake: FakeVllm, extras: bool, mode: str, stream: bool
) -> None:
    sampling = {"n": 2, **({"logprobs": 2} if extras else {})}
    body = {**_asked(**sampling), "stream": stream, "output_mode": mode}
    if extras:
        body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    # clients read either name of a token
    both = rb'"token": "token_id:\1", "token_id": \1'
    same_as_engine(client, fake, ROUTE, body, lambda sent: re.sub(rb'"token_id": ?(\d+)', both, sent))


@every_way
def test_given_ids_are_the_prompt_where_the_engine_returns_none(
    client: httpx.Client, fake: FakeVllm, stream: bool
) -> None:
    """As up to vLLM 0.29, with the names of tokens up to 0.31."""
    headers, body = in_session(), {**_asked(logprobs=0), "stream": stream}
    fake.replies.append(Reply(silent=("prompt",)))
    answer = client.post(ROUTE, json=body, headers=headers)
    assert re.findall(rb'"token": ?"token_id:(\d+)", ?"token_id": ?(\d+)', answer.content)
    [sample] = samples(client, headers["x-session-id"])
    assert (sample["prompt_ids"], sample["completion_ids"]) == (body["token_ids"], _SAMPLED)


def test_a_rollout_of_skyrl(client: httpx.Client, fake: FakeVllm) -> None:
    """As its `RemoteInferenceClient` 0.4.0 sends one, and reads the answers."""
    headers, asked = in_session(), {"max_tokens": 8, "temperature": 1.0, "logprobs": 1, "min_tokens": 1}
    ids = fresh()
    for _ in range(3):
        body = {"sampling_params": asked, "model": "tiny", "token_ids": ids, "cache_salt": "weights-0"}
        [choice] = client.post(ROUTE, json=body, headers=headers).json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (_SAMPLED, "stop")
        assert len(choice["logprobs"]["content"]) == len(_SAMPLED)
        ids = [*ids, *choice["token_ids"], 10, 11]
    ended = client.post("/finish_session", params={"session_id": headers["x-session-id"]})
    assert ended.json()["finished"] is True
    [sample] = samples(client, headers["x-session-id"])
    assert [*sample["prompt_ids"], *sample["completion_ids"]] == ids[:-2]


def test_unknown_fields_are_passed_on(client: httpx.Client, fake: FakeVllm) -> None:
    body = {**_asked(output_kind=2, new={"a": 1}), "request_id": "trl-1", "cache_salt": "s", "more": [1]}
    client.post(ROUTE, json=body)
    sampling = {**body["sampling_params"], "logprobs": 0}
    assert fake.last(ROUTE).json == {**body, "sampling_params": sampling, "return_token_ids": True}


@pytest.mark.parametrize(
    ("field", "source", "more"), [("features", "given", ()), ("content_parts", "rendered", (5, 5, 5))]
)
def test_turns_with_media_are_recorded_only(
    client: httpx.Client, fake: FakeVllm, field: str, source: str, more: tuple[int, ...]
) -> None:
    """The engine puts the ids of content parts into the prompt."""
    headers, body = in_session(), _asked()
    fake.replies.append(Reply(echo=(*body["token_ids"], *more)))
    value: Any = {"mm_hashes": {}} if source == "given" else [{"type": "image_url", "url": "data:"}]
    answer = client.post(ROUTE, json={**body, field: value}, headers=headers)
    assert answer.headers["x-prompt-source"] == source
    [turn] = turns(client, headers["x-session-id"])
    assert (turn["problem"], turn["appended"]) == ("media", len(body["token_ids"]) + len(more))


@pytest.mark.parametrize(
    "param, value",
    [("token_ids", None), ("token_ids", [[1]]), ("token_ids", [5] * 9999), ("sampling_params", 5)],
)
def test_bad_requests(client: httpx.Client, param: str, value: Any) -> None:
    answer = client.post(ROUTE, json={**_asked(), param: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_engine_without_the_route_answers_itself(client: httpx.Client, fake: FakeVllm) -> None:
    fake.canned[ROUTE] = Canned(b'{"detail": "not here"}', 404, {"content-type": "application/json"})
    answer = client.post(ROUTE, json=_asked())
    assert (answer.status_code, answer.json()) == (404, {"detail": "not here"})
    assert "x-turn-id" not in answer.headers
