"""Completions on a real vLLM: what goes in is consumed, what is sampled is recorded."""

import secrets
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.completing import (
    ROUTE,
    Body,
    choices_of,
    complete,
    every_way,
    fresh_ids,
    joined,
    keys_of,
    logprobs_of,
    samples_of,
    until_equal,
    without_ids,
)
from tests.campaign.real_vllm.conftest import Served
from tests.campaign.real_vllm.test_token_route import events
from tests.support.trl_client import load_client


@every_way
def test_ids_are_consumed_recorded_and_continued(server: Served, stream: bool) -> None:
    prompt, session = fresh_ids(), f"ids-{secrets.token_hex(4)}"
    asked: Body = {"max_tokens": 6, "stream": stream, "return_token_ids": True, "logprobs": 0}
    with server.http() as http:
        first = complete(http, session=session, prompt=prompt, **asked)
        [choice] = choices_of(first, stream)
        assert choice["prompt_token_ids"] == prompt
        following = [*prompt, *choice["token_ids"], *fresh_ids(5)]
        second = complete(http, session=session, prompt=following, **asked)
        [after] = choices_of(second, stream)
        assert after["prompt_token_ids"] == following
        [sample] = samples_of(http, session)
    assert {first.headers[name] for name in ("x-prompt-source", "x-session-id")} == {"given", session}
    assert second.headers["x-prompt-reused"] == str(len(following))
    assert sample["prompt_ids"] == prompt
    assert sample["completion_ids"] == [*following[len(prompt) :], *after["token_ids"]]
    assert [turn["id"] for turn in sample["turns"]] == [r.headers["x-turn-id"] for r in (first, second)]
    sampled = [value for value in sample["logprobs"] if value is not None]
    assert sampled == pytest.approx([*logprobs_of(choice), *logprobs_of(after)], abs=1e-5)


@every_way
def test_ids_are_continued_without_a_session(server: Served, stream: bool) -> None:
    prompt = fresh_ids(100)
    with server.http() as http:
        asked: Body = {"max_tokens": 5, "stream": stream, "return_token_ids": True}
        first = complete(http, prompt=prompt, **asked)
        [choice] = choices_of(first, stream)
        second = complete(http, prompt=[*prompt, *choice["token_ids"], *fresh_ids(40)], **asked)
        [sample] = samples_of(http, first.headers["x-session-id"])
    assert first.headers["x-session-id"] == second.headers["x-session-id"]
    assert len(sample["turns"]) == 2


@every_way
def test_texts_are_recorded_with_the_engines_own_ids(server: Served, stream: bool) -> None:
    texts, session = [f"One, two, {secrets.token_hex(4)}", "A, B,"], f"text-{secrets.token_hex(4)}"
    with server.http() as http:
        answer = complete(http, session=session, prompt=texts, max_tokens=4, stream=stream)
        choices = choices_of(answer, stream)
        tokens = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
        samples = samples_of(http, session)
    assert (answer.headers["x-prompt-source"], answer.headers["x-prompt-reason"]) == (
        "rendered",
        "text_prompt",
    )
    assert all(not choice.get("token_ids") and not choice["logprobs"] for choice in choices)
    assert [sample["prompt_ids"] for sample in samples] == tokens
    assert [sample["messages"][0]["content"] for sample in samples] == [choice["text"] for choice in choices]


@every_way
def test_a_batch_of_64_prompts(server: Served, stream: bool) -> None:
    prompts, session = [fresh_ids(8 + at % 5) for at in range(64)], f"batch-{secrets.token_hex(4)}"
    asked: Body = {"max_tokens": 3, "return_token_ids": True, "logprobs": 0, "stream": stream}
    with server.http() as http:
        answer = complete(http, session=session, prompt=prompts, **asked)
        choices = choices_of(answer, stream)
        turns = http.get(f"/v1/sessions/{session}?ids=true").json()["turns"]
        samples = samples_of(http, session)
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert answer.headers["x-session-id"] == session
    assert answer.headers["x-prompt-reused"] == str(sum(map(len, prompts)))
    first = answer.headers["x-turn-id"]
    assert [turn["id"] for turn in turns] == [f"{first[:-4]}{index:04x}" for index in range(64)]
    for choice, sample in zip(choices, samples, strict=True):
        assert sample["prompt_ids"] == choice["prompt_token_ids"]
        assert sample["completion_ids"] == choice["token_ids"]
        assert sample["logprobs"] == pytest.approx(logprobs_of(choice), abs=1e-5)


@every_way
def test_several_choices_of_several_prompts(server: Served, stream: bool) -> None:
    prompts, session = [fresh_ids(), fresh_ids()], f"choices-{secrets.token_hex(4)}"
    with server.http() as http:
        asked: Body = {
            "n": 2,
            "max_tokens": 4,
            "temperature": 1.5,
            "return_token_ids": True,
            "stream": stream,
        }
        choices = choices_of(complete(http, session=session, prompt=prompts, **asked), stream)
        samples = samples_of(http, session)
    assert [sample["prompt_ids"] for sample in samples] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [sample["completion_ids"] for sample in samples] == [choice["token_ids"] for choice in choices]
    assert all(sample["turns"][0]["temperature"] == 1.5 for sample in samples)


def test_each_prompt_without_a_session_is_its_own_rollout(server: Served) -> None:
    prompts = [fresh_ids(), fresh_ids()]
    with server.http() as http:
        answer = complete(http, prompt=prompts, max_tokens=2, n=2)
        listed = http.get("/v1/sessions?limit=2").json()["data"]
        samples = [samples_of(http, session["id"]) for session in listed]
    assert "x-session-id" not in answer.headers
    assert sorted(of_rollout[0]["prompt_ids"] for of_rollout in samples) == sorted(prompts)
    assert [len(of_rollout) for of_rollout in samples] == [2, 2]


_REQUESTS: dict[str, Body] = {
    "plain": {},
    "ids": {"return_token_ids": True},
    "no alternatives": {"logprobs": 0},
    "alternatives": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "all": {"logprobs": 1, "return_token_ids": True},
    "choices": {"n": 2, "seed": 3, "temperature": 1.0},
    "stop string": {"stop": ["a", "e", "i", " "]},
    "prompt logprobs": {"prompt_logprobs": 1, "return_token_ids": True},
    "echo": {"echo": True, "logprobs": 1},
    "echo with ids": {"echo": True, "return_token_ids": True},
    "truncated": {"truncate_prompt_tokens": 5, "return_token_ids": True},
}
_PROMPTS: dict[str, Any] = {
    "a text": "One, two, three,",
    "texts": ["One, two,", "Monday, Tuesday,"],
    "ids": [1, 4093, 198, 2683, 2, 198],
    "lists of ids": [[1, 4093, 198], [520, 9531, 198, 5]],
}
_CASES = [
    (name, prompt)
    for name in _REQUESTS
    for prompt in _PROMPTS
    if prompt in ("a text", "lists of ids") or name in ("plain", "all")
]
"""Each kind of request with one prompt and with several; the rest of the prompts with two kinds."""


@pytest.mark.parametrize("name, prompt", _CASES)
def test_whole_answers_are_those_of_a_stock_engine(
    server: Served, engines: dict[str, EngineProcess], name: str, prompt: str
) -> None:
    body: Body = {
        "model": "smollm2",
        "prompt": _PROMPTS[prompt],
        "max_tokens": 5,
        "temperature": 0,
        **_REQUESTS[name],
    }

    def ask() -> tuple[Any, Any]:
        with server.http() as http:
            ours = http.post(ROUTE, json=body)
        stock = httpx.post(engines["stock"].url + ROUTE, json=body, timeout=120)
        assert ours.status_code == stock.status_code
        if "echo" in name:
            assert ours.headers["x-prompt-reason"] == "special_request"
            assert "x-turn-id" not in ours.headers
        if name == "choices":  # sampled with equal seeds, and yet not always equal
            return keys_of([ours.json()]), keys_of([stock.json()])
        return without_ids(ours.json()), without_ids(stock.json())

    ours, stock = until_equal(ask)
    assert ours == stock


@pytest.mark.parametrize("name, prompt", [case for case in _CASES if case[0] != "prompt logprobs"])
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_streams_are_those_of_a_stock_engine(
    server: Served, engines: dict[str, EngineProcess], name: str, prompt: str, usage: Body | None
) -> None:
    asked: Body = {**_REQUESTS[name], "stream": True, **({"stream_options": usage} if usage else {})}
    body: Body = {"model": "smollm2", "prompt": _PROMPTS[prompt], "max_tokens": 5, "temperature": 0, **asked}

    def ask() -> tuple[Any, Any]:
        with server.http() as http, http.stream("POST", ROUTE, json=body) as answer:
            ours = list(events(answer))
        with httpx.stream("POST", engines["stock"].url + ROUTE, json=body, timeout=120) as answer:
            stock = list(events(answer))
        if usage is None and "echo" not in name:
            for chunk in stock:
                chunk.pop("system_fingerprint", None)  # the engine puts it into the chunk with the usage
        if name == "choices":  # sampled with equal seeds, and yet not always equal
            return keys_of(ours), keys_of(stock)
        return joined(ours), joined(stock)

    ours, stock = until_equal(ask)
    assert ours == stock


def test_trls_client(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unmodified client, with a second call that continues the first, as in a loop of tools."""
    client = load_client(monkeypatch)(base_url=server.url)
    prompts = [fresh_ids(40), fresh_ids(50)]
    first = client.generate(prompts, n=2, max_tokens=4, temperature=1.0, logprobs=0)
    assert first["prompt_ids"] == prompts
    assert [len(values) for values in first["logprobs"]] == [len(ids) for ids in first["completion_ids"]]
    following = [[*prompts[at // 2], *ids, *fresh_ids(9)] for at, ids in enumerate(first["completion_ids"])]
    second = client.generate(following, max_tokens=4, logprobs=0)
    assert second["prompt_ids"] == following
    with server.http() as http:
        listed = http.get("/v1/sessions?limit=2").json()["data"]
        found = [sample for session in listed for sample in samples_of(http, session["id"])]
    whole = [[*sample["prompt_ids"], *sample["completion_ids"]] for sample in found]
    expected = [[*ids, *more] for ids, more in zip(following, second["completion_ids"], strict=True)]
    assert sorted(whole) == sorted(expected)
    assert all(len(sample["turns"]) == 2 for sample in found)


def test_trls_client_chats(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unmodified client: each second turn begins with the ids of the first, and with what it sampled."""
    client = load_client(monkeypatch)(base_url=server.url)
    conversations: list[list[dict[str, str]]] = [
        [{"role": "user", "content": f"What is {number} + 3? {secrets.token_hex(4)}"}] for number in range(3)
    ]
    first = client.chat(conversations, max_tokens=6, temperature=1.0, logprobs=1)
    assert [len(values) for values in first["logprobs"]] == [len(ids) for ids in first["completion_ids"]]
    with server.http() as http:
        for conversation, ids in zip(conversations, first["completion_ids"], strict=True):
            tokens = [token for token in ids if token > 2]
            said = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
            conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": "And so?"}]
    second = client.chat(conversations, max_tokens=6, temperature=1.0)
    befores = zip(first["prompt_ids"], first["completion_ids"], strict=True)
    for (prompt, sampled), after in zip(befores, second["prompt_ids"], strict=True):
        assert after[: len(prompt) + len(sampled)] == prompt + sampled


@pytest.mark.parametrize("prompt", [[1.0, 4093, 198.0], [[1, 4093.0, 198]]], ids=str)
def test_whole_floats_are_ids(server: Served, prompt: Any) -> None:
    with server.http() as http:
        answer = complete(http, prompt=prompt, max_tokens=2, return_token_ids=True)
    assert answer.json()["choices"][0]["prompt_token_ids"] == [1, 4093, 198]
    assert answer.headers["x-prompt-source"] == "given"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, 10**6]},
        {"prompt": [[1], [1, 10**6]]},
        {"prompt": [5] * 9000},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ""},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": ["a", 1]},
        {"prompt": [[1], "a"]},
        {"prompt": [-1]},
        {},
    ],
    ids=str,
)
def test_bad_prompts(server: Served, fields: Body) -> None:
    with server.http() as http:
        answer = http.post(ROUTE, json={"model": "smollm2", "max_tokens": 2, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), answer.text


def test_other_bad_fields_name_themselves(server: Served) -> None:
    with server.http() as http:
        for fields, param in (
            ({"logprobs": -2}, "logprobs"),
            ({"temperature": -1}, "temperature"),
        ):
            answer = http.post(ROUTE, json={"prompt": [5, 6], "max_tokens": 2, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        answer = http.post(ROUTE, json={"prompt": [5], "model": "nobody"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_a_retry_is_answered_once(server: Served) -> None:
    headers = {"idempotency-key": secrets.token_hex(8)}
    body: Body = {
        "model": "smollm2",
        "prompt": [fresh_ids(), fresh_ids()],
        "max_tokens": 4,
        "temperature": 1.5,
    }
    with server.http() as http:
        first, again = (http.post(ROUTE, json=body, headers=headers) for _ in range(2))
    assert again.headers["x-request-replayed"] == "true"
    assert first.json() == again.json()
