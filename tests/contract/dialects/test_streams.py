import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from proxy.dialects.error_formats import error_event
from proxy.errors import EngineBroken
from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant, data_of
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
Body = dict[str, Any]
_HI = [{"role": "user", "content": "Hi"}]
_REQUESTS: dict[str, tuple[Variant, str, Body]] = {
    "tokens, chat": (Variant.CHAT, _TOKENS, {"prompt_ids": [1, 74], "stream": True}),
    "tokens, generate": (Variant.SCALE_OUT, _TOKENS, {"prompt_ids": [1, 74], "stream": True}),
    "first turn": (Variant.CHAT, _TOKENS, {"messages": _HI, "stream": True}),
    "passed through": (Variant.CHAT, _CHAT, {"messages": _HI, "stream": True}),
}


_EVERY_REQUEST = pytest.mark.parametrize(
    "pair, path, body", _REQUESTS.values(), ids=_REQUESTS, indirect=["pair"]
)


@_EVERY_REQUEST
def test_the_first_chunk_arrives_before_the_engine_sends_the_second(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body
) -> None:
    fake.replies.append(Reply(hold_at=1))
    with client.stream("POST", path, json=body) as answer:
        chunks = answer.iter_raw()
        first = next(chunks)
        assert first.startswith(b"data: {")
        assert first.endswith(b"\n\n")
        assert fake.running == 1
        fake.release()
        rest = b"".join(chunks)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert fake.aborted == 0


_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_ALL = {"return_token_ids": True, "logprobs": True, **_COUNTED}


@pytest.mark.parametrize("path, body", [(_TOKENS, {"tokens": [1, 74]}), (_CHAT, {"messages": _HI, **_ALL})])
def test_the_engines_bytes_are_not_changed(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body
) -> None:
    through = client.post(path, json={**body, "stream": True})
    direct = httpx.post(fake.url + _CHAT, content=fake.last().body, trust_env=False)
    assert through.content == direct.content


@_EVERY_REQUEST
@pytest.mark.parametrize("how", ["close", "reset", "inside"])
def test_an_engine_that_breaks_in_the_middle(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body, how: Any
) -> None:
    fake.replies.append(Reply(hold_at=1, break_at=1, how=how))
    with client.stream("POST", path, json=body) as answer:
        chunks = answer.iter_raw()
        received = next(chunks)
        fake.release()
        received += b"".join(chunks)
    _ends_with_an_error(received)


@pytest.mark.parametrize("variant, path, body", _REQUESTS.values(), ids=_REQUESTS)
def test_an_engine_that_is_killed(tiny_model: TinyModel, variant: Variant, path: str, body: Body) -> None:
    with FakeVllm(tiny_model, variant) as fake, run_proxy([fake]) as client:
        fake.replies.append(Reply(hold_at=1))
        with client.stream("POST", path, json=body) as answer:
            chunks = answer.iter_raw()
            received = next(chunks)
            fake.kill()
            received += b"".join(chunks)
    _ends_with_an_error(received)


def _ends_with_an_error(received: bytes) -> None:
    *completed, last = data_of(received)
    assert {chunk["object"] for chunk in completed} == {"chat.completion.chunk"}
    assert list(last["error"]) == ["message", "type", "param", "code"]
    assert (last["error"]["type"], last["error"]["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in received


@_EVERY_REQUEST
def test_an_engine_that_breaks_before_its_first_event(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body
) -> None:
    fake.replies.append(Reply(break_at=0))
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)


@_EVERY_REQUEST
def test_an_engine_that_breaks_before_it_answers(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body
) -> None:
    fake.hang_up = lambda seen: seen.method == "POST"
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "BadGatewayError")


@_EVERY_REQUEST
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusal_of_a_stream_is_a_plain_error(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body, stream: bool
) -> None:
    error = b'{"error": {"message": "no", "type": "BadRequestError", "param": null, "code": 400}}'
    fake.replies.append(Reply(error=Canned(error, 400, {"content-type": "application/json"})))
    answer = client.post(path, json={**body, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no")


@_EVERY_REQUEST
@pytest.mark.parametrize("how", ["close", "reset", "head"])
def test_a_whole_answer_that_never_begins(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body, how: Any
) -> None:
    """Sent anew where no head had come, since nothing of it had reached the client."""
    fake.replies.extend([Reply(break_at=0, how=how)] * 2)
    answer = client.post(path, json={**body, "stream": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, 502)


@_EVERY_REQUEST
@pytest.mark.parametrize("how", ["inside", "chunked"])
def test_a_whole_answer_that_breaks_off_does_not_look_complete(
    fake: FakeVllm, client: httpx.Client, path: str, body: Body, how: Any
) -> None:
    fake.replies.append(Reply(break_at=0, how=how))
    try:
        answer = client.post(path, json={**body, "stream": False})
    except httpx.RemoteProtocolError:
        return
    assert answer.status_code == 502


def test_openai_sdk_raises_the_error_of_a_broken_stream(fake: FakeVllm, client: httpx.Client) -> None:
    fake.replies.append(Reply(break_at=2, how="reset"))
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        stream = sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="middle of its response"):
            list(stream)


def test_the_openai_sdk_on_the_token_route(fake: FakeVllm, client: httpx.Client) -> None:
    fake.replies.extend([Reply(), Reply(break_at=2)])
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:

        def stream() -> openai.Stream[ChatCompletionChunk]:
            return sdk.post(
                "/chat/completions/tokens",
                body={"tokens": [1, 74], "stream": True},
                cast_to=ChatCompletionChunk,
                stream=True,
                stream_cls=openai.Stream[ChatCompletionChunk],
            )

        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream()) == "hi"
        with pytest.raises(openai.APIError, match="middle of its response"):
            list(stream())


@_EVERY_REQUEST
def test_many_streams_at_once(fake: FakeVllm, client: httpx.Client, path: str, body: Body) -> None:
    expected = client.post(path, json=body).content.count(b"data: ")
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(client.post(path, json=body).content.count(b"data: ")))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [expected] * 16
    wait_until(lambda: not fake.running)
    assert fake.aborted == 0


@pytest.mark.parametrize(
    "path, expected",
    [
        (
            "/v1/chat/completions?x=/messages",
            b'data: {"error":{"message":"gone","type":"BadGatewayError","param":null,"code":502}}\n\n',
        ),
        (
            "/v1/messages?beta=true",
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n',
        ),
        (
            "/v1/responses",
            b"event: error\n"
            b'data: {"type":"error","code":"BadGatewayError","message":"gone","param":null}\n\n',
        ),
    ],
)
def test_each_format_has_its_own_error_event(path: str, expected: bytes) -> None:
    assert error_event(path, EngineBroken("gone")) == expected
