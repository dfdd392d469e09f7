"""The context of a real engine: its own words for prompts that are too long, and what `overflow` does."""

from collections.abc import Iterator

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import Served, run_proxy

_CHAT = "/v1/chat/completions"
_UNSEEN = 2
"""<|im_end|>: sampled again and again, it is in the ids and not in the text."""


@pytest.fixture(scope="module")
def rendering(engines: dict[str, EngineProcess]) -> Iterator[str]:
    """The proxy before the stock engine, with `overflow: render`."""
    with run_proxy(engines["stock"].url, "--overflow", "render", "--store", "memory:") as url:
        yield url


def test_the_words_are_the_engines(server: Served) -> None:
    refused = httpx.post(f"{server.url}{_CHAT}/tokens", json={"prompt_ids": [5] * 9000}, timeout=60)
    # of given ids the engine only says that they exceed it; clients look for its words for text
    own = {"messages": [{"role": "user", "content": "a " * 9000}]}
    engines_own = httpx.post(f"{server.url}{_CHAT}", json=own, timeout=60)
    assert (refused.status_code, engines_own.status_code) == (400, 400)
    ours, theirs = (answer.json()["error"]["message"] for answer in (refused, engines_own))
    words = ours.partition("9000")[0]
    assert words.startswith("This model's maximum context length is ")
    assert theirs.startswith(words.rstrip())


def _outgrow(url: str) -> tuple[list[dict[str, str]], httpx.Response]:
    """A turn with 240 ids that its text does not show, and a next message that then does not fit."""
    size = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["max_model_len"]
    messages = [{"role": "user", "content": "a " * 100}]
    sampling = {"max_tokens": 240, "allowed_token_ids": [_UNSEEN], "ignore_eos": True}
    first = httpx.post(f"{url}{_CHAT}", json={"messages": messages, **sampling}, timeout=600)
    assert first.status_code == 200, first.text
    content = first.json()["choices"][0]["message"]["content"] or ""
    more = {"role": "user", "content": "b " * (size - 240)}
    messages = [*messages, {"role": "assistant", "content": content}, more]
    return messages, httpx.post(f"{url}{_CHAT}", json={"messages": messages, "max_tokens": 4}, timeout=600)


def test_a_conversation_that_outgrew_the_context_is_rendered(rendering: str) -> None:
    messages, answer = _outgrow(rendering)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prompt-source"] == "rendered"
    assert answer.headers["x-prompt-reason"] == "context_overflow"
    # the next turn continues the rendering
    messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "c"}]
    after = httpx.post(f"{rendering}{_CHAT}", json={"messages": messages, "max_tokens": 4}, timeout=600)
    assert after.headers["x-prompt-source"] == "extended", after.headers


def test_a_conversation_that_outgrew_the_context_is_refused(server: Served) -> None:
    _, answer = _outgrow(server.url)
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]
    assert "`overflow: render`" in answer.json()["error"]["message"]
