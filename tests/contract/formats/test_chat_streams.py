"""Streams of the chat route: what the client sees of them, and what is recorded however they end."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_vllm import FakeVllm, Reply, data_of
from tests.support.talk import CHAT, Message, Talk, call, result, user
from tests.support.tiny_model import END, SPLIT

Make = Callable[..., Talk]


def _named(made: Talk) -> str:
    """Give a conversation a session of its own."""
    made.headers["x-session-id"] = made.messages[0]["content"].replace(" ", "-")
    return made.headers["x-session-id"]


def _without_nulls(value: Any) -> Any:
    """What vLLM leaves out and what it says is null mean the same."""
    if isinstance(value, dict):
        hidden = ("token_ids", "prompt_token_ids", "logprobs")
        kept = {name: item for name, item in value.items() if item is not None or name not in hidden}
        return {name: _without_nulls(item) for name, item in kept.items()}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_REQUESTED: list[Message] = [{}, {"return_token_ids": True}, {"logprobs": True}]
_USAGE: dict[str, Message] = {
    "whole": {},
    "stream": {"stream": True},
    "stream, counted": {"stream": True, "stream_options": {"include_usage": True}},
    "stream, counted all along": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}


@pytest.mark.parametrize("how", _USAGE.values(), ids=_USAGE)
@pytest.mark.parametrize("requested", _REQUESTED, ids="+".join)
@pytest.mark.parametrize("turn", [0, 1])
def test_client_gets_only_requested_fields(talk: Make, requested: Message, how: Message, turn: int) -> None:
    """As the engine itself would answer the same request."""
    made = talk()
    messages = list(made.messages)
    script = Reply(SPLIT, message={"tool_calls": [call(identity="c")], "reasoning": "so"})
    if turn:
        made.ask(reply=script)
        messages = [*made.messages, result(call(identity="c"), "1")]
    body = {"messages": messages, "n": 2, **how, **requested}
    made.pair.fake.replies.append(script)
    mine = made.pair.client.post(CHAT, json=body)
    sent = made.pair.fake.last().json
    made.pair.fake.replies.append(script)
    exact = {"kv_transfer_params": sent["kv_transfer_params"]} if turn else {}
    theirs = httpx.post(made.pair.fake.url + CHAT, json={**body, **exact}, trust_env=False)
    stream = bool(how)
    shown = list(data_of(mine.content)) if stream else [mine.json()]
    stock = list(data_of(theirs.content)) if stream else [theirs.json()]
    assert _without_nulls(shown) == _without_nulls(stock)
    text = mine.text.replace(" ", "")
    assert ('"prompt_token_ids":[' in text) is bool(requested.get("return_token_ids"))
    assert ('"logprob"' in text) is bool(requested.get("logprobs"))


_ENDS: dict[str, Reply] = {
    "length": Reply(SPLIT[:-1]),
    "a stop string": Reply(SPLIT[:-1], finish="stop", stop="lo"),
    "tool calls": Reply(SPLIT, finish="tool_calls", message={"tool_calls": [call(identity="c")]}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", _ENDS.values(), ids=_ENDS)
def test_close_of_a_turn_is_appended_and_masked(talk: Make, reply: Reply, stream: bool) -> None:
    made = talk()
    session = _named(made)
    made.ask(reply=reply, stream=stream)
    prompt = made.ids[: -len(reply.ids)]
    new = result(call(identity="c"), "1") if reply.message else user("more")
    answered = made.follow(new, reply=Reply((90, END)), stream=stream)
    (sample,) = made.pair.client.get(f"/v1/sessions/{session}/samples").json()["samples"]
    appended = int(answered.prompt["appended"])
    assert sample["prompt_ids"] == prompt
    assert sample["prompt_ids"] + sample["completion_ids"] == made.ids
    assert sample["loss_mask"] == [1] * len(reply.ids) + [0] * appended + [1, 1]
    assert sample["logprobs"] == [-token / 8 for token in reply.ids] + [None] * appended + [-90 / 8, -END / 8]


@pytest.mark.usefixtures("resume_off")
def test_the_openai_sdk_raises_the_error_of_a_broken_stream(fake: FakeVllm, client: httpx.Client) -> None:
    fake.replies.append(Reply(break_at=2, how="reset"))
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        messages: Any = [user("Hi")]
        stream = sdk.chat.completions.create(model="tiny", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="middle of its response"):
            list(stream)
