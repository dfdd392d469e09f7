"""`required_prefix_token_ids` on the chat route."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, GENERATE, Talk, sent_ids, user
from tests.support.tiny_model import END, VOCAB_SIZE, TinyModel
from tests.support.utils import EVERY_SPELLING

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


@pytest.mark.parametrize("prefix", [[], "1", [True], [VOCAB_SIZE]], ids=str)
def test_prefixes_that_are_none(client: httpx.Client, prefix: Any) -> None:
    answer = client.post(CHAT, json={"messages": [*_HISTORY, user("more")], _FIELD: prefix})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, _FIELD)


@pytest.mark.parametrize("messages", [None, [], [user("Hi")], "Hi"])
def test_histories_that_end_no_turn(client: httpx.Client, messages: Any) -> None:
    answer = client.post(CHAT, json={"messages": messages, _FIELD: [5]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_null_is_no_prefix(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.follow(user("more"), required_prefix_token_ids=None)


def test_its_turn_is_recorded_and_continued(talk: Make) -> None:
    """A conversation does not fall apart because one of its requests brought the ids along."""
    made = talk()
    made.ask(reply=Reply(SPLIT))
    made.ask(user("more"), reply=Reply(SPLIT), required_prefix_token_ids=made.ids)
    made.follow(user("more"))
