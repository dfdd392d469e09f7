from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Reply, Variant, data_of
from tests.support.tiny_model import END, HI
from tests.support.utils import Pair

_TOKENS = "/v1/chat/completions/tokens"
_RENDER, _GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
_DERENDER = "/v1/chat/completions/derender"
_PROMPT = [1, 74, 75]
_STAND_IN = [{"role": "user", "content": "."}]
_ROLE = {"role": "assistant", "content": ""}
_USAGE = {
    **{"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9},
    "prompt_tokens_details": {"cached_tokens": 1},
}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": None}}


pytestmark = pytest.mark.parametrize("pair", [Variant.SCALE_OUT], indirect=True, ids=str)


@pytest.fixture
def fake(pair: Pair) -> FakeVllm:
    return pair.fake


def _post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post(_TOKENS, json={"prompt_ids": _PROMPT, **fields})


def _message_of(response: httpx.Response, stream: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message, assembled if streamed, and the choice or its chunks after the first."""
    if not stream:
        [choice] = response.json()["choices"]
        return choice["message"], [choice]
    head, *pieces = [choice for chunk in data_of(response.content) for choice in chunk["choices"]]
    message = dict(head["delta"])
    for piece in pieces:
        message["content"] += piece["delta"].pop("content", "")
        message |= piece["delta"]
    return message, pieces


def test_request_is_rendered_generated_and_derendered(fake: FakeVllm, client: httpx.Client) -> None:
    fields = {"model": "tiny", "temperature": 0.5, "cache_salt": "s", "priority": 3, "max_tokens": 7}
    assert _post(client, **fields).status_code == 200
    assert [seen.path for seen in fake.from_clients()] == [_RENDER, _GENERATE, _DERENDER]
    rendered, generated, derendered = (fake.last(path).json for path in (_RENDER, _GENERATE, _DERENDER))
    assert {name: rendered[name] for name in fields} == fields
    assert rendered["messages"] == [{"role": "user", "content": "."}]
    assert generated["token_ids"] == _PROMPT
    assert generated["sampling_params"] == {"temperature": 0.5, "max_tokens": 7}
    assert (generated["cache_salt"], generated["priority"]) == ("s", 3)
    assert generated["reasoning_ended"] is None
    assert (derendered["prompt_token_ids"], derendered["prompt_tokens"]) == (_PROMPT, len(_PROMPT))
    assert derendered["chat_request"]["temperature"] == 0.5


def test_completion_has_the_fields_of_the_chat_route(client: httpx.Client) -> None:
    completion = _post(client, n=2, model="adapter").json()
    expected = {"object": "chat.completion", "model": "adapter", "prompt_token_ids": _PROMPT, "usage": _USAGE}
    assert completion.items() >= {**expected, "created": 5}.items()
    assert completion["id"].startswith("chatcmpl-")
    for index, choice in enumerate(completion["choices"]):
        assert (choice["index"], choice["message"]["content"]) == (index, "hi")
        assert (choice["token_ids"], choice["finish_reason"]) == ([*HI, END], "stop")
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]


def test_stream_has_the_chunks_of_the_chat_route(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = _post(client, n=2, stream=True, stream_options=options)
    *chunks, usage = data_of(response.content)
    same = {name: chunks[0][name] for name in ("id", "object", "created", "model")}
    assert usage == {**same, "choices": [], "usage": _USAGE}
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [_PROMPT] * 2 + [None] * 6
    assert all(chunk["id"].startswith("chatcmpl-") for chunk in chunks)
    assert len({chunk["created"] for chunk in chunks}) == 1
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [{"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n} for n in range(4)]
        assert [{name: chunk["usage"][name] for name in counts[0]} for chunk in own] == counts
        head, *mine = [choice for chunk in own for choice in chunk["choices"]]
        assert head == {"index": index, "delta": _ROLE, "logprobs": None, "finish_reason": None}
        assert [token for choice in mine for token in choice["token_ids"]] == [*HI, END]
        assert [choice["delta"] for choice in mine] == [{"content": "h"}, {"content": "i"}, {}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]
        assert mine[-1]["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]


@pytest.mark.parametrize("requested, limit", [({"max_tokens": 16}, 16), ({"max_tokens": 17}, 17), ({}, None)])
def test_max_tokens_that_render_omits_is_set(
    fake: FakeVllm, client: httpx.Client, requested: dict[str, int], limit: int | None
) -> None:
    """render omits 16, the default; without a limit, generate samples to the end of the context."""
    _post(client, **requested)
    sampling = fake.last(_GENERATE).json["sampling_params"]
    assert sampling["max_tokens"] == (limit or MAX_MODEL_LEN - len(fake.model.render(_STAND_IN)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields, text", [({}, "hi"), ({"include_stop_str_in_output": True}, "hij")])
def test_stop_token_is_in_ids_but_not_in_text(
    fake: FakeVllm, client: httpx.Client, stream: bool, fields: dict[str, Any], text: str
) -> None:
    fake.replies.append(Reply((*HI, 76), stop=76, finish="stop"))
    message, choices = _message_of(_post(client, stream=stream, stop_token_ids=[76], **fields), stream)
    assert (message["role"], message["content"]) == ("assistant", text)
    assert [token for choice in choices for token in choice["token_ids"]] == [*HI, 76]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", 76)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("top", "as_ids"), [(None, False), (1, False), (1, True)])
def test_logprobs_are_converted(client: httpx.Client, stream: bool, top: int | None, as_ids: bool) -> None:
    requested = {"logprobs": True, "top_logprobs": top, "return_tokens_as_token_ids": as_ids}
    _, choices = _message_of(_post(client, stream=stream, **requested), stream)
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    for entry, token in zip(entries, [*HI, END], strict=True):
        name = f"token_id:{token}" if as_ids else str(token)
        shown = {"token": name, "logprob": -token / 8, "bytes": None if as_ids else list(name.encode())}
        assert entry == {**shown, "top_logprobs": [shown] if top else []}


@pytest.mark.parametrize(
    "tool_choice, finish, whole, streamed",
    [
        (None, "stop", "tool_calls", "tool_calls"),
        ("auto", "length", "tool_calls", "length"),
        ("required", "stop", "tool_calls", "tool_calls"),
        ("required", "length", "length", "length"),
    ],
)
def test_finish_reason_with_tool_calls_equals_the_chat_route(
    fake: FakeVllm, client: httpx.Client, tool_choice: object, finish: str, whole: str, streamed: str
) -> None:
    """vLLM reports `length` for a call that was cut short in streams, and if tool calls are required."""
    numbered = {"index": 0, "id": "1", "type": "function", "function": {"name": "f"}}
    for stream, reason in ((False, whole), (True, streamed)):
        fake.replies.append(Reply(finish=finish, message={"content": None, "tool_calls": [_CALL]}))
        message, choices = _message_of(_post(client, stream=stream, tool_choice=tool_choice), stream)
        assert message["tool_calls"] == [numbered if stream else _CALL]
        assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize(
    "name, value", [("stop", "x"), ("stop", ["x"]), ("logprob_token_ids", [5]), ("tokens", [5] * 5000)]
)
def test_what_generate_cannot_do_is_refused(client: httpx.Client, name: str, value: object) -> None:
    given = {} if name == "tokens" else {"prompt_ids": _PROMPT}
    response = client.post(_TOKENS, json={**given, name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert name != "tokens" or "maximum context length" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [_RENDER, _GENERATE, _DERENDER])
def test_errors_of_each_step(fake: FakeVllm, client: httpx.Client, path: str) -> None:
    """A malformed response is a 502: the client's request is valid."""
    body = b'{"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}'
    fake.canned[path] = Canned(body, 400, {"content-type": "application/json"})
    refused = _post(client)
    assert refused.status_code == 400
    assert (refused.json()["error"]["message"], refused.json()["error"]["param"]) == ("no", "n")
    fake.canned[path] = Canned(b"<html>" if path == _RENDER else b'{"choices": 5}')
    malformed = _post(client)
    assert (malformed.status_code, malformed.json()["error"]["type"]) == (502, "BadGatewayError")


def test_derender_failure_ends_the_stream_with_an_error(fake: FakeVllm, client: httpx.Client) -> None:
    fake.canned[_DERENDER] = Canned(b'{"error": {"message": "no"}}', 400)
    response = _post(client, stream=True)
    error = list(data_of(response.content))[-1]["error"]
    assert (error["type"], error["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in response.content
