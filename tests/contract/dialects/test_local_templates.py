"""Templates for which the last turn does not decide what follows it, and the time before that is proved."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.talk import CHAT, Talk, user
from tests.support.tiny_model import END, TinyModel, make_tiny_model
from tests.support.tiny_templates import COUNTS_MESSAGES, LOCAL, LOOKS_FOR_A_LENGTH, REFUTING_TEXT
from tests.support.utils import Pair, run_proxy, wait_until
from tokenization import ChatTokenizer
from tokenization.locality import Proof

_TOKENS = f"{CHAT}/tokens"
_NEW = [user("And then?")]
Start = Callable[..., Talk]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Makes a conversation with an engine that runs with a template, and a proxy before it."""
    with ExitStack() as stack:

        def made(template: str, **settings: Any) -> Talk:
            model = make_tiny_model(tmp_path / "model", template)
            engine = stack.enter_context(FakeVllm(model))
            options = {"store": "memory:", "proof_folder": tmp_path / "proofs", **settings}
            return Talk(Pair(engine, stack.enter_context(run_proxy([engine], **options))), model)

        yield made


def _appended(talk: Talk, answered_ids: list[int], *new: dict[str, Any]) -> str:
    """The text that was appended to the ids of the turn before."""
    answered = talk.ask(*new)
    assert answered.prompt["source"] == "extended"
    assert answered.sent is not None
    assert answered.sent[: len(answered_ids)] == answered_ids
    return ChatTokenizer.load(talk.model.folder).decode(answered.sent[len(answered_ids) :])


def test_whole_history_is_rendered_if_the_suffix_depends_on_it(start: Start) -> None:
    talk = start(COUNTS_MESSAGES)
    talk.ask(reply=Reply((74, 75, END)))
    for count in (3, 5):
        text = _appended(talk, list(talk.ids), user("more"))
        assert text == f"\n<|im_start|>user\nmore<|im_end|>\n{count}<|im_start|>assistant\n"


def test_without_the_history_only_proved_templates_are_answered(start: Start) -> None:
    body = {"prompt_ids": [1, 74, END], "append_messages": _NEW}
    client = start(COUNTS_MESSAGES).pair.client
    [engine] = client.get("/ready").json()["engines"]
    assert engine["template"]["after_messages"] == "whole history"
    refused = client.post(_TOKENS, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "template_unsupported")
    assert "earlier messages decide" in refused.json()["error"]["message"]


def test_audit_finds_a_difference_that_the_proof_missed(start: Start) -> None:
    talk = start(LOOKS_FOR_A_LENGTH, audit_share=1e-9)
    talk.messages = [user(REFUTING_TEXT)]
    talk.ask(reply=Reply((74, 75, END)))
    # the first append of a kind of conversation is audited, after it was answered
    assert "hidden" not in _appended(talk, list(talk.ids), user("more"))
    wait_until(lambda: _audits(talk.pair.client, "different") == 1)
    assert "hidden" in _appended(talk, list(talk.ids), user("more"))
    assert _audits(talk.pair.client, "same") == 0


def _audits(client: httpx.Client, result: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    name = f'tokenproxy_append_audits_total{{result="{result}"}} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


def test_requests_before_the_proof_is_complete(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the history it is exact; without, the client is told to try again."""
    go_on, prove = threading.Event(), ChatTokenizer.prove

    def later(tokenizer: ChatTokenizer, folder: Path | None = None) -> Proof:
        assert go_on.wait(20)
        return prove(tokenizer, folder)

    monkeypatch.setattr(ChatTokenizer, "prove", later)
    monkeypatch.setattr("tests.support.utils._examined", lambda engine: engine.get("append") == "ready")
    body = {"prompt_ids": [1, 74, END], "append_messages": _NEW}
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], store="memory:", proof_folder=tmp_path / "proofs") as client,
    ):
        talk = Talk(Pair(engine, client), tiny_model)
        talk.ask()
        talk.follow(user("more"))
        refused = client.post(_TOKENS, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "template_unproved"
        assert client.get("/ready").status_code == 200
        history = [user("Hi"), {"role": "assistant", "content": "h"}]
        assert client.post(_TOKENS, json={**body, "messages": history}).status_code == 200
        go_on.set()
        wait_until(lambda: client.post(_TOKENS, json=body).status_code == 200)
        talk.follow(user("more"))


def test_a_proof_is_made_once_for_all_proxies(start: Start, tmp_path: Path) -> None:
    start(LOCAL)
    [proof] = (tmp_path / "proofs").iterdir()
    made = proof.stat().st_mtime_ns
    start(LOCAL)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "proofs").iterdir()] == [made]
