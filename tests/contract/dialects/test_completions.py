"""Completions: each prompt is a turn, whatever its shape; the client gets what it requested and no more."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, data_of, error_body
from tests.support.tiny_model import END, HI, VOCAB_SIZE, TinyModel
from tests.support.utils import run_proxy, wait_until

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


def choices(answer: httpx.Response, stream: bool) -> list[Body]:
    """The choices of an answer, the pieces of each put together."""
    assert answer.status_code == 200, answer.text
    if not stream:
        found: list[Body] = answer.json()["choices"]
        return found
    made: dict[int, Body] = {}
    for chunk in data_of(answer.content):
        for piece in chunk["choices"]:
            choice = made.setdefault(piece["index"], {"text": "", "token_ids": [], "prompt_token_ids": None})
            choice["text"] += piece["text"]
            choice["token_ids"] += piece["token_ids"] or []
            choice["prompt_token_ids"] = choice["prompt_token_ids"] or piece["prompt_token_ids"]
    return [choice for _, choice in sorted(made.items())]


# --- prompts of every shape


def _shapes(model: TinyModel) -> list[tuple[Any, list[list[int]]]]:
    ids, others, text = fresh(), fresh(), f"hello {secrets.token_hex(4)}"
    encoded = model.encode(text)
    return [
        (ids, [ids]),
        ([ids], [ids]),
        ([ids, others], [ids, others]),
        (text, [encoded]),
        ([text], [encoded]),
        ([text, "there"], [encoded, model.encode("there")]),
    ]


@every_way
@pytest.mark.parametrize("shape", range(6))
@pytest.mark.parametrize("n", [1, 3])
def test_every_choice_of_every_prompt_is_a_turn(
    client: httpx.Client, tiny_model: TinyModel, shape: int, n: int, stream: bool
) -> None:
    prompt, expected = _shapes(tiny_model)[shape]
    headers = in_session()
    body = {"prompt": prompt, "n": n, "stream": stream, "temperature": 0.5}
    answer = client.post(ROUTE, json=body, headers=headers)
    assert len(choices(answer, stream)) == n * len(expected)
    recorded = samples(client, headers["x-session-id"])
    assert [sample["prompt_ids"] for sample in recorded] == [ids for ids in expected for _ in range(n)]
    assert all(sample["completion_ids"] == _SAMPLED for sample in recorded)
    assert all(sample["logprobs"] == [-token / 8 for token in _SAMPLED] for sample in recorded)
    assert all(sample["turns"][0]["temperature"] == 0.5 for sample in recorded)
    given = not isinstance(prompt, str) and not isinstance(prompt[0], str)
    assert answer.headers["x-prompt-source"] == ("given" if given else "rendered")
    assert answer.headers["x-prompt-reason"] == ("ids_given" if given else "text_prompt")
    assert answer.headers["x-prompt-reused"] == str(sum(map(len, expected)) if given else 0)


@every_way
def test_a_batch_is_one_request_whose_turns_are_numbered(
    client: httpx.Client, fake: FakeVllm, stream: bool
) -> None:
    prompts, headers = [fresh() for _ in range(64)], in_session()
    for at in range(64):
        fake.replies.append(Reply(ids=(5 + at, END)))
    answer = client.post(ROUTE, json={"prompt": prompts, "stream": stream}, headers=headers)
    assert len(fake.seen(ROUTE)) == 1
    first = answer.headers["x-turn-id"]
    found = turns(client, headers["x-session-id"])
    assert [turn["id"] for turn in found] == [f"{first[:-4]}{at:04x}" for at in range(64)]
    assert [turn["appended_ids"] for turn in found] == prompts
    assert [turn["completion_ids"] for turn in found] == [[5 + at, END] for at in range(64)]


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
    assert len(samples(client, single.headers["x-session-id"])) == 1


# --- what the client sees


@every_way
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("usage", [False, True])
def test_client_gets_what_it_requested(
    client: httpx.Client, fake: FakeVllm, ids: bool, logprobs: int | None, usage: bool, stream: bool
) -> None:
    """The same as from the engine, with the same request."""
    body: Body = {"prompt": [fresh(), fresh()], "n": 2, "stream": stream}
    body |= {"return_token_ids": True} if ids else {}
    body |= {"logprobs": logprobs} if logprobs is not None else {}
    body |= {"stream_options": {"include_usage": True}} if usage and stream else {}
    body["include_reasoning"] = False  # means nothing here
    ours, engines = client.post(ROUTE, json=body), httpx.post(fake.url + ROUTE, json=body)
    if not stream:
        assert ours.json() == engines.json()
        return
    assert list(data_of(ours.content)) == list(data_of(engines.content))
    assert ours.content.endswith(b"data: [DONE]\n\n")


@every_way
def test_trls_request(client: httpx.Client, stream: bool) -> None:
    prompts = [fresh(), fresh()]
    body = {
        **{"model": "tiny", "prompt": prompts, "return_token_ids": True, "return_tokens_as_token_ids": True},
        **{"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"max_tokens": 16, "logprobs": 0, "stream": stream},
    }
    found = choices(client.post(ROUTE, json=body), stream)
    assert [choice["token_ids"] for choice in found] == [_SAMPLED] * 4
    assert [choice["prompt_token_ids"] for choice in found[::2]] == prompts
    if not stream:
        assert found[0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in _SAMPLED]


# --- continuing


@every_way
@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("length", [3, 12, 70, 300, 1100])
@pytest.mark.parametrize("added", [0, 1, 200])
def test_a_prompt_that_begins_with_a_turns_ids_continues_it(
    client: httpx.Client, length: int, added: int, session: bool, stream: bool
) -> None:
    headers = in_session() if session else {}
    prompt, more = fresh(length), fresh(added)
    first = client.post(ROUTE, json={"prompt": prompt, "stream": stream}, headers=headers)
    following = [*prompt, *_SAMPLED, *more]
    second = client.post(ROUTE, json={"prompt": following, "stream": stream}, headers=headers)
    assert second.headers["x-session-id"] == first.headers["x-session-id"]
    assert second.headers["x-prompt-reused"] == str(len(following))
    [sample] = samples(client, first.headers["x-session-id"])
    assert sample["prompt_ids"] == prompt
    assert sample["completion_ids"] == [*_SAMPLED, *more, *_SAMPLED]
    assert sample["loss_mask"] == [1, 1, 1, *[0] * added, 1, 1, 1]


def test_the_longest_turn_is_continued(client: httpx.Client) -> None:
    prompt = fresh(20)
    session = client.post(ROUTE, json={"prompt": prompt}).headers["x-session-id"]
    for _ in range(3):
        prompt = [*prompt, *_SAMPLED, *fresh(4)]
        assert client.post(ROUTE, json={"prompt": prompt}).headers["x-session-id"] == session
    found = turns(client, session)
    assert [turn["parent"] for turn in found] == [None, *(turn["id"] for turn in found[:-1])]


def test_other_ids_begin_a_rollout(client: httpx.Client) -> None:
    prompt = fresh(30)
    first = client.post(ROUTE, json={"prompt": prompt})
    other = client.post(ROUTE, json={"prompt": [*prompt, HI[0], HI[1], END + 1, 5]})
    assert other.headers["x-session-id"] != first.headers["x-session-id"]
    [again] = {client.post(ROUTE, json={"prompt": fresh(30)}).headers["x-session-id"]}
    assert again not in (first.headers["x-session-id"], other.headers["x-session-id"])


def test_equal_rollouts_are_each_continued_once(client: httpx.Client) -> None:
    """Two members of a group sampled the same: two requests that continue them go to one each."""
    prompt = fresh()
    group = {client.post(ROUTE, json={"prompt": prompt}).headers["x-session-id"] for _ in range(2)}
    assert len(group) == 2
    following = [*prompt, *_SAMPLED, 9]
    answers = [client.post(ROUTE, json={"prompt": following}) for _ in range(3)]
    assert {answer.headers["x-session-id"] for answer in answers[:2]} == group
    assert answers[2].headers["x-session-id"] not in group
    assert answers[0].headers["x-prompt-candidates"] == "2"


def test_a_batch_continues_a_batch(client: httpx.Client) -> None:
    prompts = [fresh(40) for _ in range(8)]
    client.post(ROUTE, json={"prompt": prompts})
    following = [[*ids, *_SAMPLED, *fresh(3)] for ids in prompts]
    client.post(ROUTE, json={"prompt": following[::-1]})
    listed = client.get("/v1/sessions?limit=8").json()["data"]
    found = [samples(client, session["id"]) for session in listed]
    whole = [[*of[0]["prompt_ids"], *of[0]["completion_ids"]] for of in found]
    assert sorted(whole) == sorted([*ids, *_SAMPLED] for ids in following)


def test_a_failed_request_gives_back_what_it_claimed(client: httpx.Client, fake: FakeVllm) -> None:
    prompt = fresh()
    group = {client.post(ROUTE, json={"prompt": prompt}).headers["x-session-id"] for _ in range(2)}
    following = [*prompt, *_SAMPLED, 9]
    fake.replies.append(Reply(error=Canned(error_body("no", "BadRequestError", None, 400), 400)))
    assert client.post(ROUTE, json={"prompt": [following, following]}).status_code == 400
    answers = [client.post(ROUTE, json={"prompt": following}) for _ in range(2)]
    assert {answer.headers["x-session-id"] for answer in answers} == group


def test_turns_of_the_token_route_are_continued_in_their_session(client: httpx.Client) -> None:
    headers, prompt = in_session(), fresh()
    client.post("/v1/chat/completions/tokens", json={"prompt_ids": prompt}, headers=headers)
    following = [*prompt, *_SAMPLED, 7]
    client.post(ROUTE, json={"prompt": following}, headers=headers)
    client.post(
        "/v1/chat/completions/tokens", json={"prompt_ids": [*following, *_SAMPLED, 8]}, headers=headers
    )
    [sample] = samples(client, headers["x-session-id"])
    assert len(sample["turns"]) == 3


# --- requests out of the ordinary


@every_way
@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"use_beam_search": True}, {"suffix": "x"}, {"prompt_embeds": "AA=="}], ids=str
)
def test_special_requests_pass_unrecorded(
    client: httpx.Client, fake: FakeVllm, fields: Body, stream: bool
) -> None:
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


def test_truncated_ids_are_recorded_as_the_engine_used_them(client: httpx.Client, fake: FakeVllm) -> None:
    headers, prompt = in_session(), fresh()
    fake.replies.append(Reply(echo=tuple(prompt[-5:])))
    answer = client.post(ROUTE, json={"prompt": prompt, "truncate_prompt_tokens": 5}, headers=headers)
    assert answer.headers["x-prompt-reason"] == "special_request"
    [sample] = samples(client, headers["x-session-id"])
    assert sample["prompt_ids"] == prompt[-5:]


_ODD = {
    "prompt_mismatch": Reply(echo=(5, 6)),
    "no_prompt_ids": Reply(silent=("prompt",)),
    "no_completion_ids": Reply(silent=("ids",)),
    "no_logprobs": Reply(silent=("logprobs",)),
    "logprobs_mismatch": Reply(logprobs_short=1),
    "usage_mismatch": Reply(miscounted=1),
}
_ONLY_WHOLE = ("no_completion_ids", "logprobs_mismatch")


@pytest.mark.parametrize(
    "problem, stream",
    [
        (problem, stream)
        for problem in _ODD
        for stream in (False, True)
        if not stream or problem not in _ONLY_WHOLE
    ],
)
def test_odd_evidence_makes_a_turn_untrainable_and_fails_no_answer(
    client: httpx.Client, fake: FakeVllm, problem: str, stream: bool
) -> None:
    headers = in_session()
    fake.replies.extend([_ODD[problem], Reply()])
    answer = client.post(ROUTE, json={"prompt": [fresh(), fresh()], "stream": stream}, headers=headers)
    assert [choice["text"] for choice in choices(answer, stream)] == ["hi", "hi"]
    first, second = turns(client, headers["x-session-id"])
    assert first["problem"] == problem
    # whole answers count the ids of all prompts together, so that a difference may be in any of them
    counts = problem in ("usage_mismatch", "no_completion_ids") and not stream
    assert second["problem"] == ("usage_mismatch" if counts else None)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[1], []]},
        {"prompt": 5},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": ["a", 1]},
        {"prompt": [[1], "a"]},
        {"prompt": [1, [2]]},
        {"prompt": [-1]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": [[1], [None]]},
        {"prompt": [5] * (MAX_MODEL_LEN + 1)},
        {"prompt": [[5], [5] * (MAX_MODEL_LEN + 1)]},
        {"prompt": [VOCAB_SIZE]},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_bad_prompts(client: httpx.Client, fields: Body) -> None:
    answer = client.post(ROUTE, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, "prompt", "BadRequestError")
    assert "x-prompt-source" not in answer.headers


def test_other_bad_requests(client: httpx.Client) -> None:
    assert client.post(ROUTE, content=b"[1]").json()["error"]["param"] == "body"
    assert client.post(ROUTE, json={"prompt": [1], "model": 5}).json()["error"]["param"] == "model"
    unknown = client.post(ROUTE, json={"prompt": [1], "model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    for field in ("prompt", "token_ids"):
        answer = client.post("/v1/sessions", json={"overrides": {field: [1]}})
        assert answer.json()["error"]["param"] == f"overrides.{field}"


def test_sessions_set_fields(client: httpx.Client, fake: FakeVllm) -> None:
    session = in_session()["x-session-id"]
    client.post("/v1/sessions", json={"id": session, "defaults": {"seed": 7}, "overrides": {"top_k": 5}})
    client.post(f"/sessions/{session}{ROUTE}", json={"prompt": fresh(), "top_k": 1})
    assert {name: fake.last(ROUTE).json[name] for name in ("seed", "top_k")} == {"seed": 7, "top_k": 5}
    assert len(turns(client, session)) == 1


@every_way
def test_a_named_retry_is_answered_once(client: httpx.Client, fake: FakeVllm, stream: bool) -> None:
    headers = {**in_session(), "idempotency-key": secrets.token_hex(8)}
    body = {"prompt": [fresh(), fresh()], "stream": stream}
    first, again = (client.post(ROUTE, json=body, headers=headers) for _ in range(2))
    assert again.headers["x-request-replayed"] == "true"
    assert first.content == again.content
    assert len(fake.seen(ROUTE)) == 1
    assert len(turns(client, headers["x-session-id"])) == 2


def test_a_client_that_leaves_has_what_was_sampled_recorded(client: httpx.Client, fake: FakeVllm) -> None:
    headers = in_session()
    fake.replies.extend([Reply(ids=(*HI, *HI, END), hold_at=2), Reply()])
    body = {"prompt": [fresh(), fresh()], "stream": True}
    with client.stream("POST", ROUTE, json=body, headers=headers) as answer:
        next(answer.iter_lines())
    wait_until(lambda: turns(client, headers["x-session-id"]))
    [turn] = turns(client, headers["x-session-id"])
    assert (turn["finish_reason"], turn["completion_ids"]) == ("abort", list(HI))
    assert fake.aborted == 1


def test_recording_can_be_turned_off(tiny_model: TinyModel) -> None:
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], store="memory:", record_token_route=False) as client,
    ):
        body = {"prompt": fresh()}
        answer = client.post(ROUTE, json=body, headers=in_session())
        assert "x-turn-id" not in answer.headers
        assert engine.last(ROUTE).json == body


def test_a_deleted_session_gets_no_turn(client: httpx.Client, fake: FakeVllm) -> None:
    headers = in_session()
    session = headers["x-session-id"]
    client.post(ROUTE, json={"prompt": fresh()}, headers=headers)
    fake.replies.append(Reply(hold_at=1))
    body = {"prompt": [fresh(), fresh()], "stream": True}
    with client.stream("POST", ROUTE, json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert client.delete(f"/v1/sessions/{session}").status_code == 200
        fake.release()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert client.get(f"/v1/sessions/{session}").status_code == 404


def test_the_class_of_a_request_is_recorded(client: httpx.Client) -> None:
    headers = {**in_session(), "x-claude-code-request-class": "subagent"}
    client.post(ROUTE, json={"prompt": fresh()}, headers=headers)
    client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}, headers=headers
    )
    session = headers["x-session-id"]
    assert [turn["request_class"] for turn in turns(client, session)] == ["subagent"] * 2
    assert [s["turns"][0]["request_class"] for s in samples(client, session)] == ["subagent"] * 2


def test_prompts_stay_on_the_replica_that_holds_them(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as one, FakeVllm(tiny_model) as two, run_proxy([one, two]) as client:
        prompts = [fresh(400) for _ in range(4)]
        client.post(ROUTE, json={"prompt": prompts})
        [holder] = [engine for engine in (one, two) if engine.seen(ROUTE)]
        for _ in range(3):
            prompts = [[*ids, *_SAMPLED, *fresh(5)] for ids in prompts]
            client.post(ROUTE, json={"prompt": prompts})
        assert len(holder.seen(ROUTE)) == 4


def test_a_batch_is_sent_again_to_another_replica(tiny_model: TinyModel) -> None:
    headers = in_session()
    with FakeVllm(tiny_model) as one, FakeVllm(tiny_model) as two, run_proxy([one, two]) as client:
        broken = Reply(error=Canned(error_body("broken", "InternalServerError", None, 500), 500))
        one.replies.extend([broken] * 2)
        prompts = [fresh(), fresh()]
        for _ in range(2):  # one of the two goes to the broken replica first
            answer = client.post(ROUTE, json={"prompt": prompts}, headers=headers)
            assert answer.status_code == 200
        assert len(turns(client, headers["x-session-id"])) == 4


def _metric(client: httpx.Client, line: str) -> float:
    text = client.get("/metrics").text
    return next((float(each.split()[-1]) for each in text.splitlines() if each.startswith(line)), 0.0)


def test_prompts_and_ids_are_counted(client: httpx.Client) -> None:
    prompts: Sequence[list[int]] = [fresh(), fresh()]
    given = 'tokenproxy_prompts_total{reason="ids_given",source="given"}'
    before = [_metric(client, line) for line in (given, 'tokenproxy_prompt_ids_total{kind="given"}')]
    client.post(ROUTE, json={"prompt": prompts})
    after = [_metric(client, line) for line in (given, 'tokenproxy_prompt_ids_total{kind="given"}')]
    assert [late - early for late, early in zip(after, before, strict=True)] == [2, 24]
    text = 'tokenproxy_prompts_total{reason="text_prompt",source="rendered"}'
    early, rendered = _metric(client, text), 'tokenproxy_prompt_ids_total{kind="rendered"}'
    ids = _metric(client, rendered)
    client.post(ROUTE, json={"prompt": ["hello", json.dumps(fresh())]})
    assert _metric(client, text) - early == 2
    assert _metric(client, rendered) > ids
