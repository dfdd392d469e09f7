"""Templates whose last turn does not decide what follows, or that leave out thinking of earlier turns."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer
from chat_tokenizer.proof import Proof
from tests.support.fake_vllm import Reply
from tests.support.talk import CHAT, Talk, call, result, user
from tests.support.tiny_model import END, make_tiny_model
from tests.support.tiny_templates import COUNTS_MESSAGES, NEVER_THINKS, THINKS, THINKS_AFTER_LAST_USER
from tests.support.utils import wait_until

_TOKENS = f"{CHAT}/tokens"
_NEW = [user("And then?")]
Start = Callable[..., Talk]


@pytest.fixture
def own_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of earlier tests do not count."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def start(tmp_path: Path, own_proofs: None, own_talk: Start) -> Start:
    """Makes a conversation with an engine that runs with a template, and a proxy before it."""
    return lambda template, **settings: own_talk(
        model=make_tiny_model(tmp_path / "model", template), **settings
    )


def test_whole_history_is_rendered_if_the_suffix_depends_on_it(start: Start) -> None:
    talk = start(COUNTS_MESSAGES)
    talk.ask(reply=Reply((74, 75, END)))
    for count in (3, 5):
        before, answered = list(talk.ids), talk.ask(user("more"))
        assert answered.sent is not None and answered.sent[: len(before)] == before
        text = ChatTokenizer.load(talk.model.folder).decode(answered.sent[len(before) :])
        assert text == f"\n<|im_start|>user\nmore<|im_end|>\n{count}<|im_start|>assistant\n"


def test_a_required_prefix_keeps_thinking_that_the_template_drops(start: Start) -> None:
    talk = start(THINKS_AFTER_LAST_USER)
    talk.ask(reply=Reply((74, 75, END), message={"reasoning": "hm", "content": "hi"}))
    before = list(talk.ids)
    talk.ask(user("more"), reply=Reply((74, END)), required_prefix_token_ids=before)
    assert talk.ids[: len(before)] == before
    text = ChatTokenizer.load(talk.model.folder).decode(talk.ids[len(before) : -2])
    assert text == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_without_the_history_only_proved_templates_are_answered(start: Start) -> None:
    client = start(COUNTS_MESSAGES).pair.client
    [engine] = client.get("/ready").json()["engines"]
    assert engine["template"]["after_messages"] == "whole history"
    refused = client.post(_TOKENS, json={"prompt_ids": [1, 74, END], "append_messages": _NEW})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "template_unsupported")


@pytest.mark.usefixtures("own_proofs")
def test_requests_before_the_proof(own_talk: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, prove = threading.Event(), ChatTokenizer.prove

    def later(tokenizer: ChatTokenizer, folder: Path | None = None) -> Proof:
        assert go_on.wait(20)
        return prove(tokenizer, folder)

    monkeypatch.setattr(ChatTokenizer, "prove", later)
    monkeypatch.setattr("tests.support.utils._examined", lambda engine: engine.get("append") == "ready")
    body = {"prompt_ids": [1, 74, END], "append_messages": _NEW}
    talk = own_talk()
    client = talk.pair.client
    talk.ask()
    talk.follow(user("more"))
    refused = client.post(_TOKENS, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "template_unproved")
    history = [user("Hi"), {"role": "assistant", "content": "h"}]
    assert client.post(_TOKENS, json={**body, "messages": history}).status_code == 200
    go_on.set()
    wait_until(lambda: client.post(_TOKENS, json=body).status_code == 200)
    talk.follow(user("more"))


def _thought(index: int, **message: Any) -> Reply:
    ids = (90 + index, 74, END)
    return Reply(ids, message={"content": f"It is {index}.", "reasoning": f"thought {index}", **message})


def test_thinking_stays_while_tools_are_called(start: Start) -> None:
    """A template that drops it at the next user message keeps it before: these turns are one sample."""
    talk = start(THINKS_AFTER_LAST_USER, thinking_policy="template")
    calls = [call(), call()]
    talk.ask(reply=_thought(0, tool_calls=[calls[0]]))
    assert talk.ask(result(calls[0], "4"), reply=_thought(1, tool_calls=[calls[1]])).reason == ""
    assert talk.ask(result(calls[1], "5"), reply=_thought(2)).reason == ""
    assert talk.ask(user("more"), reply=_thought(3)).reason == "thinking_dropped"


@pytest.mark.parametrize("template, dropped", [(THINKS, ""), (NEVER_THINKS, "thinking_dropped")])
def test_sessions_choose(start: Start, template: str, dropped: str) -> None:
    """By default all is kept."""
    first = start(template)
    pair, model = first.pair, first.model
    described = {"id": "chosen", "defaults": {"thinking_policy": "template"}}
    assert pair.client.post("/v1/sessions", json=described).is_success
    for session, reason in (("kept", ""), ("chosen", dropped)):
        talk = Talk(pair, model, headers={"x-session-id": session})
        talk.ask(reply=_thought(0))
        assert talk.ask(user("more"), reply=_thought(1)).reason == reason


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]
)
def test_requests_of_every_format_choose(start: Start, path: str, name: str) -> None:
    talk = start(NEVER_THINKS)
    fields = {"model": "tiny", "thinking_policy": "template"} | ({"max_tokens": 9} if name != "input" else {})
    talk.pair.fake.replies.append(_thought(0))
    said = [user("Hi")]
    talk.pair.client.post(path, json={**fields, name: said})
    said.append({"role": "assistant", "content": "It is 0."})
    second = talk.pair.client.post(path, json={**fields, name: [*said, user("more")]})
    assert second.headers["x-prompt-reason"] == "thinking_dropped"
    assert not [seen for seen in talk.pair.fake.requests if b"thinking_policy" in seen.body]
    refused = talk.pair.client.post(path, json={**fields, name: said, "thinking_policy": "drop"})
    assert refused.status_code == 400 and "thinking_policy" in refused.text
