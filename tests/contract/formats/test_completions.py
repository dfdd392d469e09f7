"""Completions: each prompt is a turn, whatever its shape; the client gets what it requested and no more."""

import json
import secrets
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply, data_of
from tests.support.tiny_model import END, HI, VOCAB_SIZE, TinyModel

ROUTE = "/v1/completions"
Body = dict[str, Any]
_SAMPLED = [*HI, END]

every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def fresh(count: int = 12) -> list[int]:
    """Ids that no other test sends."""
    return [3 + secrets.randbelow(290) for _ in range(count)]


def in_session() -> dict[str, str]:
    return {"x-session-id": f"s-{secrets.token_hex(8)}"}


def samples(client: httpx.Client, session: str) -> list[Body]:
    answer = client.get(f"/v1/sessions/{session}/samples").json()
    assert answer["refused"] == []
    found: list[Body] = answer["samples"]
    return found


def same_as_engine(
    client: httpx.Client,
    fake: FakeVllm,
    route: str,
    body: Body,
    changed: Callable[[bytes], bytes] = lambda answer: answer,
) -> None:
    """Assert that the proxy answers a request as its engine would, but for what `changed` does to it."""
    ours, engines = client.post(route, json=body), httpx.post(fake.url + route, json=body)
    expected = changed(engines.content)
    if body["stream"]:
        assert list(data_of(ours.content)) == list(data_of(expected))
    else:
        assert ours.json() == json.loads(expected)


def turns(client: httpx.Client, session: str) -> list[Body]:
    found: list[Body] = client.get(f"/v1/sessions/{session}?ids=true").json().get("turns", [])
    return found


@every_way
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(("n", "batch"), [(1, False), (3, True)])
def test_every_choice_is_a_turn(
    client: httpx.Client, tiny_model: TinyModel, text: bool, n: int, batch: bool, stream: bool
) -> None:
    items: list[Any] = [f"hello {secrets.token_hex(4)}", "there"] if text else [fresh(), fresh()]
    items = items if batch else items[:1]
    expected = [tiny_model.encode(item) if text else item for item in items]
    headers = in_session()
    body = {"prompt": items if batch else items[0], "n": n, "stream": stream, "temperature": 0.5}
    answer = client.post(ROUTE, json=body, headers=headers)
    recorded = samples(client, headers["x-session-id"])
    assert [sample["prompt_ids"] for sample in recorded] == [ids for ids in expected for _ in range(n)]
    for sample in recorded:
        assert sample["completion_ids"] == _SAMPLED
        assert sample["logprobs"] == [-token / 8 for token in _SAMPLED]
        assert sample["turns"][0]["temperature"] == 0.5
    source, reused = ("rendered", 0) if text else ("given", sum(map(len, expected)))
    assert (answer.headers["x-prompt-source"], answer.headers["x-prompt-reused"]) == (source, str(reused))
    assert answer.headers["x-prompt-reason"] == ("text_prompt" if text else "ids_given")


@every_way
def test_a_batch_is_one_request_of_numbered_turns(client: httpx.Client, fake: FakeVllm, stream: bool) -> None:
    prompts, headers = [fresh() for _ in range(8)], in_session()
    for at in range(8):
        fake.replies.append(Reply(ids=(5 + at, END)))
    answer = client.post(ROUTE, json={"prompt": prompts, "stream": stream}, headers=headers)
    assert len(fake.seen(ROUTE)) == 1
    first = answer.headers["x-turn-id"]
    found = turns(client, headers["x-session-id"])
    assert [turn["id"] for turn in found] == [f"{first[:-4]}{at:04x}" for at in range(8)]
    assert [turn["completion_ids"] for turn in found] == [[5 + at, END] for at in range(8)]


def test_what_the_engine_is_asked_for(client: httpx.Client, fake: FakeVllm) -> None:
    prompt = [fresh(), fresh()]
    fields = {"prompt": prompt, "n": 2, "seed": 1, "unknown": {"a": [1]}}
    client.post(ROUTE, json=fields)
    assert fake.last(ROUTE).json == {**fields, "return_token_ids": True, "logprobs": 0}
    client.post(ROUTE, json={**fields, "logprobs": 3})
    assert fake.last(ROUTE).json["logprobs"] == 3


def test_without_a_session_each_prompt_is_a_rollout(client: httpx.Client) -> None:
    prompts = [fresh(), fresh()]
    answer = client.post(ROUTE, json={"prompt": prompts, "n": 2})
    assert "x-session-id" not in answer.headers
    listed = client.get("/v1/sessions?limit=2").json()["data"]
    recorded = [samples(client, session["id"]) for session in listed]
    assert sorted(of[0]["prompt_ids"] for of in recorded) == sorted(prompts)
    assert [len(of) for of in recorded] == [2, 2]
    single = client.post(ROUTE, json={"prompt": prompts[0][:5]})
    client.post(ROUTE, json={"prompt": [*prompts[0][:5], *_SAMPLED, 5]})
    [sample] = samples(client, single.headers["x-session-id"])
    assert sample["completion_ids"] == [*_SAMPLED, 5, *_SAMPLED]


@every_way
@pytest.mark.parametrize("extras", [{}, {"return_token_ids": True}, {"logprobs": 1}])
def test_client_gets_what_it_requested(
    client: httpx.Client, fake: FakeVllm, extras: Body, stream: bool
) -> None:
    """The same as from the engine, with the same request."""
    body: Body = {"prompt": [fresh(), fresh()], "n": 2, "stream": stream, **extras}
    if extras and stream:
        body["stream_options"] = {"include_usage": True}
    same_as_engine(client, fake, ROUTE, body)


@every_way
@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"use_beam_search": True}, {"suffix": "x"}, {"prompt_embeds": "AA=="}], ids=str
)
def test_special_requests(client: httpx.Client, fake: FakeVllm, fields: Body, stream: bool) -> None:
    body = {"prompt": fresh(), "stream": stream, **fields}
    answer = client.post(ROUTE, json=body, headers=in_session())
    assert fake.last(ROUTE).json == body
    assert answer.content == httpx.post(fake.url + ROUTE, json=body).content
    assert answer.headers["x-prompt-reason"] == "special_request"
    assert "x-turn-id" not in answer.headers and "x-session-id" not in answer.headers


@pytest.mark.parametrize("prompt", [None, [], [[1], []], [1, "a"], [VOCAB_SIZE], [[5], [5] * 5000]])
def test_bad_prompts(client: httpx.Client, prompt: Any) -> None:
    answer = client.post(ROUTE, json={"prompt": prompt})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "prompt", "BadRequestError")
    assert "x-prompt-source" not in answer.headers
