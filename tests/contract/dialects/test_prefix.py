"""`required_prefix_token_ids` on the chat route."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.talk import CHAT, GENERATE, Talk, call, result, sent_ids, user
from tests.support.tiny_model import END, VOCAB_SIZE, TinyModel
from tests.support.utils import EVERY_SPELLING, run_proxy

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
_FIELD = "required_prefix_token_ids"
_HISTORY = [user("Keep it"), {"role": "assistant", "content": "hello"}]


def _expected(model: TinyModel, prefix: list[int], messages: list[Any], **kwargs: Any) -> list[int]:
    """The prefix, and what the template renders after the last assistant turn of the history."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    before = model.render(messages[: last + 1], False, **kwargs)
    end = max(i for i, token in enumerate(before) if token == END)
    return [*prefix, *model.render(messages, **kwargs)[end + (prefix[-1] == END) :]]


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [SPLIT, (*SPLIT[:-1],), (90, END)])
def test_the_prefix_is_kept(
    client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel, sampled: tuple[int, ...], stream: bool
) -> None:
    prefix = [*tiny_model.render(_HISTORY[:1]), *sampled]
    messages = [*_HISTORY, user("more")]
    fake.replies.append(Reply(SPLIT))
    answer = client.post(CHAT, json={"messages": messages, _FIELD: prefix, "stream": stream})
    assert answer.status_code == 200, answer.text
    sent = sent_ids(fake)
    assert sent == _expected(tiny_model, prefix, messages)
    headers = {name[9:]: value for name, value in answer.headers.items() if name.startswith("x-prompt-")}
    appended = str(len(sent) - len(prefix))
    assert headers == {
        "source": "given",
        "reused": str(len(prefix)),
        "appended": appended,
        "reason": "prefix_given",
    }
    generated = [seen for seen in fake.requests if seen.path in (CHAT, GENERATE)]
    assert not any(_FIELD.encode() in seen.body for seen in generated)


def test_tools_and_template_arguments_count(
    client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel
) -> None:
    function = {"name": "f", "description": None, "parameters": None}
    tools = [{"type": "function", "function": function}]
    one = call()
    turn = {"role": "assistant", "content": "", "tool_calls": [one]}
    messages = [user("Hi"), turn, result(one, "1")]
    prefix = [*tiny_model.render(messages[:1], tools=tools), *SPLIT]
    kwargs = {"enable_thinking": False}
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs, _FIELD: prefix}
    assert client.post(CHAT, json=body).status_code == 200
    as_objects = json.loads(json.dumps(messages))
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {}
    assert sent_ids(fake) == _expected(tiny_model, prefix, as_objects, tools=tools, **kwargs)


@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_returned_only_if_requested(
    client: httpx.Client, tiny_model: TinyModel, requested: bool, stream: bool
) -> None:
    prefix = [*tiny_model.render(_HISTORY[:1]), *SPLIT]
    body = {"messages": [*_HISTORY, user("more")], _FIELD: prefix, "stream": stream}
    text = client.post(CHAT, json={**body, **({"return_token_ids": True} if requested else {})}).text
    assert ('"prompt_token_ids":[' in text.replace(" ", "")) is requested


_BAD: dict[str, dict[str, Any]] = {
    "empty": {_FIELD: []},
    "text": {_FIELD: "1"},
    "a boolean": {_FIELD: [True]},
    "out of vocabulary": {_FIELD: [VOCAB_SIZE]},
    "beyond any integer": {_FIELD: [10**30]},
}


@pytest.mark.parametrize("fields", _BAD.values(), ids=_BAD)
def test_prefixes_that_are_none(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post(CHAT, json={"messages": [*_HISTORY, user("more")], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, _FIELD)


@pytest.mark.parametrize("messages", [None, [], [user("Hi")], "Hi"])
def test_histories_that_end_no_turn(client: httpx.Client, messages: Any) -> None:
    answer = client.post(CHAT, json={"messages": messages, _FIELD: [5]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_null_is_no_prefix(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.follow(user("more"), required_prefix_token_ids=None)


def test_an_engine_that_takes_no_ids(tiny_model: TinyModel) -> None:
    with (
        FakeVllm(tiny_model, Variant.NEITHER) as engine,
        run_proxy([engine], store="memory:") as client,
    ):
        answer = client.post(CHAT, json={"messages": [*_HISTORY, user("more")], _FIELD: [5, *SPLIT]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_token_in")


def test_its_turn_is_recorded_and_continued(talk: Make) -> None:
    """A conversation does not fall apart because one of its requests brought the ids along."""
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.ask(user("more"), reply=Reply(SPLIT), required_prefix_token_ids=made.ids)
    made.follow(user("more"))


def test_a_retry_of_it_is_answered_once(talk: Make) -> None:
    made = talk()
    prefix = [*made.model.render(made.messages), *SPLIT]
    body = {"messages": [*made.messages, _HISTORY[1], user("more")], _FIELD: prefix}
    headers = {"idempotency-key": made.messages[0]["content"]}
    first, second = (made.pair.client.post(CHAT, json=body, headers=headers) for _ in range(2))
    assert first.status_code == 200
    assert second.headers.get("x-request-replayed") == "true"
