"""`required_prefix_token_ids` on the chat route."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, GENERATE, Talk, sent_ids, user
from tests.support.tiny_model import END, SPLIT, VOCAB_SIZE, TinyModel
from tests.support.utils import EVERY_SPELLING

Make = Callable[..., Talk]
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
@pytest.mark.parametrize("sampled", [SPLIT, SPLIT[:-1]])
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
    for name, value in (("source", "given"), ("reused", str(len(prefix))), ("reason", "prefix_given")):
        assert answer.headers[f"x-prompt-{name}"] == value
    generated = [seen for seen in fake.requests if seen.path in (CHAT, GENERATE)]
    assert not any(_FIELD.encode() in seen.body for seen in generated)
    tokenized = client.post("/tokenize", json={"messages": messages, _FIELD: prefix}).json()
    assert (tokenized["tokens"], tokenized["appended"]) == (sent, len(sent) - len(prefix))
    assert not [seen for seen in fake.requests if seen.path == "/tokenize"]


@pytest.mark.parametrize(
    ("messages", "prefix", "param"),
    [
        ([user("Hi")], [5], "messages"),
        ("Hi", [5], "messages"),
        (_HISTORY, [5], "messages"),
        ([*_HISTORY, user("more")], [VOCAB_SIZE], _FIELD),
        ([*_HISTORY, user("more")], [5], _FIELD),
    ],
)
def test_bad_requests(client: httpx.Client, messages: Any, prefix: list[int], param: str) -> None:
    answer = client.post(CHAT, json={"messages": messages, _FIELD: prefix})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_its_turn_is_recorded_and_continued(talk: Make) -> None:
    """A conversation does not fall apart because one of its requests brought the ids along."""
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.ask(user("more"), reply=Reply(SPLIT), required_prefix_token_ids=made.ids)
    made.follow(user("more"))


ASKING = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
"""The fields with which NeMo-Gym requests ids on messages."""
NAMES = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
ASKED = user("What does Gym ask?")
"""A text of no other test, because tests share one store."""


@EVERY_SPELLING
def test_each_turn_begins_with_the_ids_on_the_last_message(client: httpx.Client, fake: FakeVllm) -> None:
    """The client keeps whole messages; nothing but them carries the ids."""
    messages: list[Any] = [ASKED]
    before: list[int] = []
    for reply in (SPLIT, (90, END), SPLIT):
        fake.replies.append(Reply(reply))
        response = client.post(CHAT, json={"messages": messages, **ASKING})
        message = response.json()["choices"][0]["message"]
        assert message["prompt_token_ids"][: len(before)] == before
        assert message["generation_token_ids"] == list(reply)
        assert len(message["generation_log_probs"]) == len(reply)
        if before:
            assert sent_ids(fake) == message["prompt_token_ids"]
            assert response.headers["x-prompt-reused"] == str(len(before))
        before = [*message["prompt_token_ids"], *reply]
        messages += [message, user("more")]
    generated = [seen.body for seen in fake.requests if seen.path in (CHAT, GENERATE)]
    assert not any(name.encode() in body for body in generated for name in NAMES[1:])


_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}


@pytest.mark.parametrize(
    ("first", "fields", "last", "param"),
    [
        (ASKED, {"prompt_token_ids": None}, user("more"), "messages[1].prompt_token_ids"),
        (ASKED, {"generation_token_ids": [1.5]}, user("more"), "messages[1].generation_token_ids"),
        (ASKED, {"generation_log_probs": ["-1"]}, user("more"), "messages[1].generation_log_probs"),
        (ASKED, {}, _IMAGE, "messages"),  # this engine takes no images next to ids
        (user("Ho ho ho"), {}, user("more"), "messages[1].prompt_token_ids"),
    ],
)
def test_wrong_histories(
    client: httpx.Client, tiny_model: TinyModel, first: Any, fields: Any, last: Any, param: str
) -> None:
    ids = {"prompt_token_ids": tiny_model.render([ASKED]), "generation_token_ids": list(SPLIT)}
    turn = {"role": "assistant", "content": "hello", **ids, "generation_log_probs": [-0.5] * 6, **fields}
    response = client.post(CHAT, json={"messages": [first, turn, last]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert (error["code"] == "prefix_mismatch") is (first is not ASKED)


def test_all_messages_after_the_prefix_are_recorded(talk: Make) -> None:
    made = talk(headers={"x-session-id": "of-a-prefix"})
    made.ask(reply=Reply(SPLIT))
    turn = {
        **made.messages[-1],
        "prompt_token_ids": made.ids[: -len(SPLIT)],
        "generation_token_ids": [*SPLIT],
    }
    new = [user("b"), {"role": "assistant", "content": "own"}, user("c")]
    made.messages[-1:] = [{**turn, "content": "edited words"}]
    made.ask(*new, reply=Reply(SPLIT))
    [sample] = made.client.get("/v1/sessions/of-a-prefix/samples").json()["samples"]
    assert [each["content"] for each in sample["messages"][1:]] == ["hello", "b", "own", "c", "hello"]


def test_all_appended_messages_are_recorded(talk: Make) -> None:
    """The same on the token route."""
    made = talk(headers={"x-session-id": "of-given-ids"})
    made.ask(reply=Reply(SPLIT))
    new = [user("b"), {"role": "assistant", "content": "own"}, user("c")]
    said = [made.messages[0], {**made.messages[1], "content": "edited words"}]
    body = {"prompt_ids": made.ids, "messages": said, "append_messages": new}
    assert made.client.post(f"{CHAT}/tokens", json=body, headers=made.headers).status_code == 200
    [sample] = made.client.get("/v1/sessions/of-given-ids/samples").json()["samples"]
    assert [each["content"] for each in sample["messages"][1:]] == ["hello", "b", "own", "c", "hi"]


_ODD = pytest.mark.parametrize(
    "odd", [True, 1, "x", [1], [{}], {"a": 1}, [None], [{"type": "other"}]], ids=str
)


@_ODD
def test_calls_of_a_user_are_none(client: httpx.Client, tiny_model: TinyModel, odd: Any) -> None:
    request = {"messages": [*_HISTORY, {**user("more"), "tool_calls": odd}]}
    prefix = [*tiny_model.render(_HISTORY[:1]), *SPLIT]
    assert client.post("/tokenize", json={**request, _FIELD: prefix}).status_code == 200


@pytest.mark.parametrize("odd", [None, ["a"], {"a": 1}, 5], ids=str)
def test_a_call_with_an_odd_id(talk: Make, odd: Any) -> None:
    made = talk()
    call = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made.ask(reply=Reply(SPLIT, message={"content": None, "tool_calls": [call]}, finish="tool_calls"))
    made.messages[-1]["tool_calls"][0]["id"] = odd
    made.ask({"role": "tool", "tool_call_id": odd, "content": "r"})
    without = {"role": "assistant", "content": None, "tool_calls": [{**call, "id": None}]}
    answer = made.client.post(CHAT, json={"messages": [user("Hi"), without, user("more")]})
    assert answer.status_code == 200
