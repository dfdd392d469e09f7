"""Completions and generate on a real vLLM: what goes in is consumed, what is sampled is recorded."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.real_vllm.conftest import START_TIMEOUT_S, Served, run_proxy, wait_ready
from tests.real_vllm.test_token_route import events
from tests.real_vllm.trl_client import load_client

ROUTE = "/v1/completions"
GENERATE = "/inference/v1/generate"
Body = dict[str, Any]

every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def fresh_ids(count: int = 12) -> list[int]:
    """Ids that no other test sends."""
    return [1000 + secrets.randbelow(30_000) for _ in range(count)]


def complete(
    http: httpx.Client, route: str = ROUTE, *, session: str | None = None, **body: Any
) -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    response = http.post(route, json={"model": "smollm2", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def choices_of(response: httpx.Response, stream: bool) -> list[Body]:
    """The choices of an answer, with the pieces of a stream put together."""
    if not stream:
        choices: list[Body] = response.json()["choices"]
        return choices
    made: dict[int, Body] = {}
    for chunk in events(response):
        for piece in chunk["choices"]:
            choice = made.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": []})
            choice["text"] += piece.get("text") or ""
            choice["token_ids"] += piece.get("token_ids") or []
            logprobs = piece.get("logprobs") or {}
            choice["logprobs"] += logprobs.get("token_logprobs") or []
            choice["logprobs"] += [entry["logprob"] for entry in logprobs.get("content") or []]
            for name in ("prompt_token_ids", "weight_versions", "finish_reason"):
                choice[name] = piece.get(name) or choice.get(name)
    return [choice for _, choice in sorted(made.items())]


def logprobs_of(choice: Body) -> list[float]:
    logprobs = choice["logprobs"]
    return logprobs if isinstance(logprobs, list) else logprobs["token_logprobs"]


def samples_of(http: httpx.Client, session: str) -> list[Body]:
    answer = http.get(f"/v1/sessions/{session}/samples").json()
    assert answer["refused"] == []
    samples: list[Body] = answer["samples"]
    return samples


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


def _without_ids(value: Any) -> Any:
    """An answer without what differs between two equal requests: id, time, and the last digits of numbers."""
    if isinstance(value, dict):
        left_out = ("id", "created", "request_id", "prompt_tokens_details")
        return {name: _without_ids(one) for name, one in value.items() if name not in left_out}
    if isinstance(value, list):
        return [_without_ids(one) for one in value]
    return round(value, 1) if isinstance(value, float) else value


@pytest.mark.parametrize("prompt", _PROMPTS)
@pytest.mark.parametrize("name", _REQUESTS)
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
    with server.http() as http:
        ours = http.post(ROUTE, json=body)
    stock = httpx.post(engines["stock"].url + ROUTE, json=body, timeout=120)
    assert ours.status_code == stock.status_code
    if name == "choices":  # sampled with equal seeds, and yet not always equal
        assert _keys([ours.json()]) == _keys([stock.json()])
    else:
        assert _without_ids(ours.json()) == _without_ids(stock.json())
    if "echo" in name:
        assert ours.headers["x-prompt-reason"] == "special_request"
        assert "x-turn-id" not in ours.headers


@pytest.mark.parametrize("prompt", _PROMPTS)
@pytest.mark.parametrize("name", [name for name in _REQUESTS if "prompt" not in name])
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_streams_are_those_of_a_stock_engine(
    server: Served, engines: dict[str, EngineProcess], name: str, prompt: str, usage: Body | None
) -> None:
    asked: Body = {**_REQUESTS[name], "stream": True, **({"stream_options": usage} if usage else {})}
    body: Body = {"model": "smollm2", "prompt": _PROMPTS[prompt], "max_tokens": 5, "temperature": 0, **asked}
    with server.http() as http, http.stream("POST", ROUTE, json=body) as answer:
        ours = list(events(answer))
    with httpx.stream("POST", engines["stock"].url + ROUTE, json=body, timeout=120) as answer:
        stock = list(events(answer))
    if usage is None and "echo" not in name:
        for chunk in stock:
            chunk.pop("system_fingerprint", None)  # the engine puts it into the chunk with the usage
    if name == "choices":  # sampled with equal seeds, and yet not always equal
        assert _keys(ours) == _keys(stock)
    else:
        assert _joined(ours) == _joined(stock)


def _keys(chunks: list[Body]) -> set[str]:
    """The names in chunks and their choices, and which of them are always null."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = {name for chunk in chunks for name in chunk} | {
        f"choices.{name}" for one in choices for name in one
    }
    return found | {
        f"{name} is null" for one in choices[:1] for name in one if all(c[name] is None for c in choices)
    }


def _joined(chunks: list[Body]) -> Body:
    """What a stream says of each choice, however it is cut into chunks; without ids and times."""
    joined: dict[int, Body] = {}
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        choice = joined.setdefault(piece["index"], dict.fromkeys(piece))
        for name, value in piece.items():
            before = choice.get(name)
            if isinstance(before, dict) and value is not None:
                choice[name] = {key: before[key] + value[key] for key in before}
            elif isinstance(before, str | list) and value is not None and name != "finish_reason":
                choice[name] = before + value
            elif value is not None:
                choice[name] = value
    totals = [chunk for chunk in chunks if not chunk["choices"]]
    said = {"choices": [choice for _, choice in sorted(joined.items())], "totals": totals}
    return {**_without_ids(said), "keys": _keys(chunks)}


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


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, 10**6]},
        {"prompt": [[1], [1, 10**6]]},
        {"prompt": [5] * 5000},
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


# --- generate


@contextmanager
def _tokens_in_and_out(model: Path, folder: Path) -> Iterator[dict[str, Served]]:
    """An engine with the plugin, the scale-out routes and the development routes, and a proxy before it."""
    with EngineProcess(
        model,
        extra_flags=["--enable-scale-out"],
        # a store of its own: with the version of these weights, other engines would not fit the fleet
        extra_environment={"VLLM_SERVER_DEV_MODE": "1", "TOKENPROXY_STORE": f"sqlite:///{folder}/inside.db"},
        log_file=folder / "generate.log",
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        with run_proxy(engine.url, "--store", f"sqlite:///{folder}/front.db") as front:
            yield {"inside": Served(engine.url, engine), "front": Served(front, engine)}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    with _tokens_in_and_out(model, tmp_path_factory.mktemp("generate")) as served:
        yield served


@pytest.fixture(params=["inside", "front"])
def generating(request: pytest.FixtureRequest, both: dict[str, Served]) -> Served:
    served: Served = both[request.param]
    return served


@every_way
def test_generate_is_recorded_with_the_weights_that_sampled(generating: Served, stream: bool) -> None:
    prompt, version = fresh_ids(), f"step-{secrets.token_hex(3)}"
    with generating.http() as http:
        assert http.post("/update_weight_version", json={"new_version": version}).status_code == 200
        body: Body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 5, "temperature": 1.1},
            "stream": stream,
        }
        answer = complete(http, GENERATE, **body)
        [choice] = choices_of(answer, stream)
        session = answer.headers["x-session-id"]
        following = [*prompt, *choice["token_ids"], 198]
        body |= {"token_ids": following}
        after = complete(http, GENERATE, **body)
        [sample] = samples_of(http, session)
    assert after.headers["x-session-id"] == session
    assert answer.headers["x-prompt-source"] == "given"
    assert sample["prompt_ids"] == prompt
    assert sample["completion_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert [turn["temperature"] for turn in sample["turns"]] == [1.1, 1.1]
    [span] = sample["turns"][0]["weight_versions"]
    assert span == [version, 0, len(choice["token_ids"])]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": span[2]}]


_GENERATED: dict[str, Body] = {
    "plain": {"sampling_params": {"max_tokens": 4, "temperature": 0}},
    "logprobs": {"sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 2}},
    "prompt": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "return_token_ids": True},
    "text": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "output_mode": "text"},
    "choices": {"sampling_params": {"max_tokens": 4, "temperature": 1.0, "n": 2, "seed": 5}},
    "unknown": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "something": {"new": 1}},
}


@every_way
@pytest.mark.parametrize("name", _GENERATED)
def test_generate_answers_as_a_stock_engine(
    engines: dict[str, EngineProcess], proxies: dict[str, str], name: str, stream: bool
) -> None:
    body: Body = {"token_ids": [1, 4093, 198, 2683], "stream": stream, **_GENERATED[name]}
    answers = []
    for url in (proxies["in front of vLLM"], engines["stock"].url):
        answer = httpx.post(url + GENERATE, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        answers.append(list(events(answer)) if stream else [answer.json()])
    ours, stock = answers
    assert _keys(ours) == _keys(stock)
    if name != "choices":  # sampled with equal seeds, and yet not always equal
        assert _joined(ours) == _joined(stock)


def test_generate_refuses_bad_ids(generating: Served) -> None:
    with generating.http() as http:
        for ids in ([], [-1], "a", None, [1, 10**6], [5] * 5000):
            answer = http.post(GENERATE, json={"token_ids": ids, "sampling_params": {"max_tokens": 1}})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "token_ids", answer.text


def test_generate_without_the_flag_keeps_the_engines_answer(engines: dict[str, EngineProcess]) -> None:
    answer = httpx.post(engines["plugin"].url + GENERATE, json={"token_ids": [1], "sampling_params": {}})
    assert answer.status_code == 403, (answer.headers, answer.text)
    assert "--enable-scale-out" in answer.json()["error"]["message"]
