"""Completions: each prompt is a turn, whatever its shape; the client gets what it requested and no more."""

import secrets
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


def turns(client: httpx.Client, session: str) -> list[Body]:
    found: list[Body] = client.get(f"/v1/sessions/{session}?ids=true").json().get("turns", [])
    return found


@every_way
@pytest.mark.parametrize("kind", ["ids", "batch of ids", "text", "batch of texts"])
@pytest.mark.parametrize("n", [1, 3])
def test_every_choice_is_a_turn(
    client: httpx.Client, tiny_model: TinyModel, kind: str, n: int, stream: bool
) -> None:
    items: list[Any] = [f"hello {secrets.token_hex(4)}", "there"] if "text" in kind else [fresh(), fresh()]
    prompt = items if "batch" in kind else items[0]
    items = items if "batch" in kind else items[:1]
    expected = [tiny_model.encode(item) if "text" in kind else item for item in items]
    headers = in_session()
    body = {"prompt": prompt, "n": n, "stream": stream, "temperature": 0.5}
    answer = client.post(ROUTE, json=body, headers=headers)
    recorded = samples(client, headers["x-session-id"])
    assert [sample["prompt_ids"] for sample in recorded] == [ids for ids in expected for _ in range(n)]
    assert all(sample["completion_ids"] == _SAMPLED for sample in recorded)
    assert all(sample["logprobs"] == [-token / 8 for token in _SAMPLED] for sample in recorded)
    assert all(sample["turns"][0]["temperature"] == 0.5 for sample in recorded)
    given = "ids" in kind
    assert answer.headers["x-prompt-source"] == ("given" if given else "rendered")
    assert answer.headers["x-prompt-reason"] == ("ids_given" if given else "text_prompt")
    assert answer.headers["x-prompt-reused"] == str(sum(map(len, expected)) if given else 0)


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
    assert [turn["appended_ids"] for turn in found] == prompts
    assert [turn["completion_ids"] for turn in found] == [[5 + at, END] for at in range(8)]


def test_what_the_engine_is_asked_for(client: httpx.Client, fake: FakeVllm) -> None:
    prompt = [fresh(), fresh()]
    fields = {"prompt": prompt, "n": 2, "seed": 1, "unknown": {"a": [1]}}
    client.post(ROUTE, json=fields)
    assert fake.last(ROUTE).json == {**fields, "return_token_ids": True, "logprobs": 0}
    client.post(ROUTE, json={**fields, "logprobs": 3})
    assert fake.last(ROUTE).json["logprobs"] == 3
    client.post(ROUTE, json={**fields, "stream": True})
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert fake.last(ROUTE).json["stream_options"] == usage


def test_without_a_session_each_prompt_is_a_rollout(client: httpx.Client) -> None:
    prompts = [fresh(), fresh()]
    answer = client.post(ROUTE, json={"prompt": prompts, "n": 2})
    assert "x-session-id" not in answer.headers
    listed = client.get("/v1/sessions?limit=2").json()["data"]
    assert not any(session["explicit"] for session in listed)
    recorded = [samples(client, session["id"]) for session in listed]
    assert sorted(of[0]["prompt_ids"] for of in recorded) == sorted(prompts)
    assert [len(of) for of in recorded] == [2, 2]
    single = client.post(ROUTE, json={"prompt": prompts[0][:5]})
    client.post(ROUTE, json={"prompt": [*prompts[0][:5], *_SAMPLED, 5]})
    [sample] = samples(client, single.headers["x-session-id"])
    assert sample["completion_ids"] == [*_SAMPLED, 5, *_SAMPLED]


@every_way
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_client_gets_what_it_requested(
    client: httpx.Client, fake: FakeVllm, extras: bool, logprobs: int | None, stream: bool
) -> None:
    """The same as from the engine, with the same request."""
    body: Body = {"prompt": [fresh(), fresh()], "n": 2, "stream": stream}
    body |= {"return_token_ids": True} if extras else {}
    body |= {"logprobs": logprobs} if logprobs is not None else {}
    body |= {"stream_options": {"include_usage": True}} if extras and stream else {}
    body["include_reasoning"] = False  # means nothing here
    ours, engines = client.post(ROUTE, json=body), httpx.post(fake.url + ROUTE, json=body)
    if stream:
        assert list(data_of(ours.content)) == list(data_of(engines.content))
    else:
        assert ours.json() == engines.json()


@every_way
@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"use_beam_search": True}, {"suffix": "x"}, {"prompt_embeds": "AA=="}], ids=str
)
def test_special_requests(client: httpx.Client, fake: FakeVllm, fields: Body, stream: bool) -> None:
    body = {"prompt": fresh(), "stream": stream, **fields}
    answer = client.post(ROUTE, json=body, headers=in_session())
    assert answer.status_code == 200
    assert fake.last(ROUTE).json == body
    assert answer.content == httpx.post(fake.url + ROUTE, json=body).content
    assert (answer.headers["x-prompt-source"], answer.headers["x-prompt-reason"]) == (
        "rendered",
        "special_request",
    )
    assert "x-turn-id" not in answer.headers and "x-session-id" not in answer.headers


@pytest.mark.parametrize("prompt", [None, [], [[1], []], [1, "a"], [True], [VOCAB_SIZE], [[5], [5] * 5000]])
def test_bad_prompts(client: httpx.Client, prompt: Any) -> None:
    answer = client.post(ROUTE, json={"prompt": prompt})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "prompt", "BadRequestError")
    assert "x-prompt-source" not in answer.headers
