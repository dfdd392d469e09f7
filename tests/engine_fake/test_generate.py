import json
from typing import Any

import httpx
import pytest

from tests.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, Variant, data_of
from tests.tiny_model import END, HI
from tests.utils import Pair

_TOKENS = "/v1/chat/completions/tokens"
_RENDER, _GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
_DERENDER = "/v1/chat/completions/derender"
_PROMPT = [1, 74, 75]


pytestmark = pytest.mark.parametrize("pair", [Variant.SCALE_OUT], indirect=True, ids=str)


@pytest.fixture
def fake(pair: Pair) -> FakeVllm:
    return pair.fake


def _post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post(_TOKENS, json={"prompt_ids": _PROMPT, **fields})


def test_three_steps(fake: FakeVllm, client: httpx.Client) -> None:
    fields = {"model": "tiny", "temperature": 0.5, "cache_salt": "s", "priority": 3}
    assert _post(client, **fields).status_code == 200
    assert [seen.path for seen in fake.requests if seen.method == "POST"] == [_RENDER, _GENERATE, _DERENDER]
    rendered, generated, derendered = (fake.last(path).json for path in (_RENDER, _GENERATE, _DERENDER))
    assert {name: rendered[name] for name in fields} == fields
    assert rendered["messages"] == [{"role": "user", "content": "."}]
    assert generated["token_ids"] == _PROMPT
    assert generated["sampling_params"] == {"temperature": 0.5}
    assert (generated["cache_salt"], generated["priority"]) == ("s", 3)
    assert generated["reasoning_ended"] is None
    assert (derendered["prompt_token_ids"], derendered["prompt_tokens"]) == (_PROMPT, len(_PROMPT))
    assert derendered["chat_request"]["temperature"] == 0.5


def test_the_history_is_context_for_parsing_only(fake: FakeVllm, client: httpx.Client) -> None:
    history = [{"role": "user", "content": "Hi"}]
    _post(client, messages=history)
    assert fake.last(_RENDER).json["messages"] == [{"role": "user", "content": "."}]
    assert fake.last(_DERENDER).json["chat_request"]["messages"] == history


def test_a_whole_completion(fake: FakeVllm, client: httpx.Client) -> None:
    completion = _post(client, n=2, model="adapter").json()
    assert completion["object"] == "chat.completion"
    assert completion["model"] == "adapter"
    assert completion["id"].startswith("chatcmpl-")
    assert completion["prompt_token_ids"] == _PROMPT
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    for index, choice in enumerate(completion["choices"]):
        assert (choice["index"], choice["message"]["content"]) == (index, "hi")
        assert (choice["token_ids"], choice["finish_reason"]) == ([*HI, END], "stop")
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]


def test_a_stream(fake: FakeVllm, client: httpx.Client) -> None:
    answer = _post(client, n=2, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content.endswith(b"data: [DONE]\n\n")
    *chunks, usage = data_of(answer.content)
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [_PROMPT] + [None] * 5
    assert all(chunk["id"].startswith("chatcmpl-") for chunk in chunks)
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == [*HI, END]
        assert "".join(choice["delta"]["content"] for choice in mine) == "hi"
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]


def test_every_choice_of_a_stream_has_its_own_state(fake: FakeVllm, client: httpx.Client) -> None:
    _post(client, n=2, stream=True)
    states: dict[int, list[list[int] | None]] = {0: [], 1: []}
    for seen in fake.seen(_DERENDER):
        [choice] = seen.json["generate_chunk"]["choices"]
        state = seen.json.get("stream_state")
        states[choice["index"]].append(state and state["output_token_ids"])
    assert states == {index: [None, [HI[0]], list(HI)] for index in range(2)}


@pytest.mark.parametrize("stream", [False, True])
def test_without_ids(fake: FakeVllm, client: httpx.Client, stream: bool) -> None:
    answer = _post(client, stream=stream, return_token_ids=False)
    chunks = list(data_of(answer.content)) if stream else [answer.json()]
    for chunk in chunks:
        assert chunk.get("prompt_token_ids") is None
        assert all(choice.get("token_ids") is None for choice in chunk["choices"])


@pytest.mark.parametrize(
    "tool_choice, reason",
    [
        (None, "tool_calls"),
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function"}, "stop"),
    ],
)
def test_calls_end_a_turn_as_they_do_in_the_chat_route(
    fake: FakeVllm, client: httpx.Client, tool_choice: object, reason: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fake.replies.append(Reply(message={"tool_calls": [call]}))
    [choice] = _post(client, tool_choice=tool_choice).json()["choices"]
    assert choice["message"]["tool_calls"] == [call]
    assert choice["finish_reason"] == reason


@pytest.mark.parametrize("stop", ["x", ["x"]])
def test_stop_strings_are_refused(fake: FakeVllm, client: httpx.Client, stop: object) -> None:
    answer = _post(client, stop=stop)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize("stop", [None, [], ""])
def test_no_stop_strings(fake: FakeVllm, client: httpx.Client, stop: object) -> None:
    assert _post(client, stop=stop).status_code == 200


@pytest.mark.parametrize("path", [_RENDER, _GENERATE, _DERENDER])
def test_a_step_that_is_refused(fake: FakeVllm, client: httpx.Client, path: str) -> None:
    body = b'{"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}'
    fake.canned[path] = Canned(body, 400, {"content-type": "application/json"})
    answer = _post(client)
    assert answer.status_code == 400
    assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == ("no", "n")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b""])
@pytest.mark.parametrize("path", [_RENDER, _GENERATE, _DERENDER])
def test_a_step_that_answers_nonsense(fake: FakeVllm, client: httpx.Client, path: str, body: bytes) -> None:
    """The client did nothing wrong, so it is no 400."""
    fake.canned[path] = Canned(body)
    answer = _post(client)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")


@pytest.mark.parametrize("body", [b'{"choices": 5}', b'{"choices": [5]}', b'{"choices": []}'])
@pytest.mark.parametrize("path", [_GENERATE, _DERENDER])
def test_choices_that_do_not_match(fake: FakeVllm, client: httpx.Client, path: str, body: bytes) -> None:
    if path == _GENERATE:
        fake.canned[_DERENDER] = Canned(b'{"choices": [{}]}')
    fake.canned[path] = Canned(body)
    answer = _post(client)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")


@pytest.mark.parametrize(
    "canned", [Canned(b'{"error": {"message": "no"}}', 400), Canned(b"<html>"), Canned(b"{}")]
)
def test_a_stream_that_cannot_be_derendered(fake: FakeVllm, client: httpx.Client, canned: Canned) -> None:
    fake.canned[_DERENDER] = canned
    answer = _post(client, stream=True)
    error = list(data_of(answer.content))[-1]["error"]
    assert (error["type"], error["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in answer.content


def test_errors_of_the_engine_in_a_stream_are_passed_on(fake: FakeVllm, client: httpx.Client) -> None:
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}
    body = b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
    fake.canned[_GENERATE] = Canned(body, 200, {"content-type": "text/event-stream"})
    assert list(data_of(_post(client, stream=True).content)) == [error]


def test_too_long_a_prompt_is_said_in_the_words_of_the_chat_route(
    fake: FakeVllm, client: httpx.Client
) -> None:
    answer = client.post(_TOKENS, json={"tokens": [5] * (MAX_MODEL_LEN + 1)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tokens")
    assert "maximum context length" in error["message"]
