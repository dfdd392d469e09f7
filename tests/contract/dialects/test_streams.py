"""Streams that are passed through, and what OpenAI's SDK makes of them."""

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.fake_vllm import FakeVllm, Reply

_TOKENS, _CHAT = "/v1/chat/completions/tokens", "/v1/chat/completions"
_HI = [{"role": "user", "content": "Hi"}]
_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_ALL = {"return_token_ids": True, "logprobs": True, **_COUNTED}


@pytest.mark.parametrize("path, body", [(_TOKENS, {"tokens": [1, 74]}), (_CHAT, {"messages": _HI, **_ALL})])
def test_the_engines_bytes_are_not_changed(
    fake: FakeVllm, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    through = client.post(path, json={**body, "stream": True})
    direct = httpx.post(fake.url + _CHAT, content=fake.last().body, trust_env=False)
    assert through.content == direct.content


def test_the_openai_sdk_raises_the_error_of_a_broken_stream(fake: FakeVllm, client: httpx.Client) -> None:
    fake.replies.extend([Reply(), Reply(break_at=2, how="reset")])
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
