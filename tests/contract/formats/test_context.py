"""Prompts that are longer than the model's context: refused early, in vLLM's words, or rendered anew."""

from collections.abc import Callable
from typing import Any

import httpx

from tests.support.fake_vllm import MAX_MODEL_LEN, FakeVllm, Reply
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair, run_proxy

TOKENS = "/v1/chat/completions/tokens"
_THOUGHT = Reply((*[74] * 3000, END), message={"content": "short"})
"""A turn whose ids are many, and of which the client gets back little."""


def _error(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    return error


def test_ids_beyond_the_context_never_reach_the_engine(client: httpx.Client, fake: FakeVllm) -> None:
    error = _error(client.post(TOKENS, json={"prompt_ids": [5] * (MAX_MODEL_LEN + 1)}))
    assert error["param"] == "prompt_ids"
    new = [{"role": "user", "content": [{"type": "text", "text": "a" * 9000}]}]
    error = _error(client.post(TOKENS, json={"prompt_ids": [5, END], "append_messages": new}))
    assert error["param"] == "append_messages"
    assert not fake.from_clients()


def test_a_conversation_that_outgrew_the_context_is_refused(talk: Callable[..., Talk]) -> None:
    made = talk()
    made.ask(reply=_THOUGHT)
    error = _error(made.pair.client.post(CHAT, json={"messages": [*made.messages, user("a" * 1500)]}))
    assert error["param"] == "messages" and "`overflow: render`" in error["message"]
    made.follow(user("less"))  # what was refused claims nothing


def test_an_outgrown_conversation_is_rendered(mortal: FakeVllm, tiny_model: TinyModel) -> None:
    """The completion must fit too."""
    cases: list[Any] = [(1500, {"stream": True}), (1, {"max_completion_tokens": 2000})]
    with run_proxy([mortal], store="memory:", overflow="render") as client:
        for length, fields in cases:
            made = Talk(Pair(mortal, client), tiny_model)
            first = made.ask(reply=_THOUGHT)
            answered = made.ask(user("a" * length), **fields)
            assert (answered.sent, answered.reason) == (None, "context_overflow")
            # an honest branch: the same session, and its next turn continues the rendering
            assert answered.session == first.session
            made.follow(user("more"))
            turns = client.get(f"/v1/sessions/{first.session}").json()["turns"]
            assert [turn["parent"] for turn in turns][:2] == [None, None]
