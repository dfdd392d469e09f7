"""Appends after a template that needs more than the last turn, on real engines that run with it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.client.calls import LIMITS
from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import (
    FRONT,
    INSIDE,
    START_TIMEOUT_S,
    checkpoint_with,
    run_proxy,
    wait_ready,
)
from tests.campaign.real_vllm.plain import CHAT, TOKENS, Conversation, Message, Turn, continues, forced, user
from tests.support.tiny_templates import REFUTING_TEXT
from tests.support.utils import wait_until
from tokenization import ChatTokenizer

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 120)
"""The first test of each way to run also waits for the start of its engine."""

# One template for all tests, because each engine takes a minute of a core to start. It prints the number of
# messages in conversations without tool results only, so that the history decides what follows a turn before
# user messages, which the proof finds, and before tool results if the first text has 41 characters, which no
# proof tries.
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'boom' %}{{ 1 / 0 }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + ' [END]<|im_end|>\n' }}"
    "{% if m.role == 'assistant' and m.content == 'yes' %}"
    "{{ '<|im_start|>system\nWhy?<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if 'tool' not in messages | map(attribute='role') %}{{ messages | length }}{% endif %}"
    "{% if (messages[0].content | length) == 41 %}{{ 'hidden' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CLOSE = " [END]<|im_end|>"
_STOP, _OTHER_STOP, _WORD = 2, 0, 260
"""Ids of `<|im_end|>`, of `<|endoftext|>`, which ends turns too, and of a piece of text."""
_RESULT: Message = {"role": "tool", "tool_call_id": "a", "content": "17 °C"}


@pytest.fixture(scope="module")
def model_with_two_stops(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a second EOS, as the generation configs of many models have."""
    name = "generation_config.json"
    config = {**json.loads((model / name).read_text()), "eos_token_id": [_STOP, _OTHER_STOP]}
    return checkpoint_with(model, tmp_path_factory.mktemp("two-stops"), name, config)


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def http(
    request: pytest.FixtureRequest, model_with_two_stops: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server whose engine runs with the template."""
    folder = tmp_path_factory.mktemp("appends")
    template = folder / "template.jinja"
    template.write_text(_TEMPLATE)
    inside = request.param == INSIDE
    # proofs of its own, because the audit changes the stored one; each local append is audited
    environment = {"TOKENPROXY_PROOF_FOLDER": str(folder / "proofs"), "TOKENPROXY_AUDIT_SHARE": "1"}
    with EngineProcess(
        model_with_two_stops,
        plugin=inside,
        extra_flags=["--chat-template", str(template)],
        extra_environment=environment,
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if inside:
            yield from _client(engine.url)
        else:
            flags = (
                "--chat-template",
                str(template),
                "--proof-folder",
                environment["TOKENPROXY_PROOF_FOLDER"],
            )
            with run_proxy(engine.url, *flags, "--audit-share", "1") as url:
                yield from _client(url)


def _client(url: str) -> Iterator[httpx.Client]:
    wait_ready(url)
    with httpx.Client(base_url=url, timeout=120, limits=LIMITS) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    """To spell ids out."""
    return ChatTokenizer.load(model)


def _answers(text: str) -> dict[str, Any]:
    """Options with which the engine samples a text and ends the turn."""
    return {"structured_outputs": {"choice": [text]}, "temperature": 0, "max_tokens": 8}


def _extended_by(turn: Turn, before: Turn, tokenizer: ChatTokenizer) -> str:
    """The text of what was appended to all that the turn before consumed and sampled."""
    assert continues(turn, before), turn.source
    return tokenizer.decode(turn.prompt_ids[len(before.prompt_ids) + len(before.ids) :])


def _rendered(http: httpx.Client, messages: list[Message]) -> list[int]:
    """The engine's own rendering of a conversation."""
    ids: list[int] = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    return ids


def test_ready_reports_what_the_template_depends_on(http: httpx.Client) -> None:
    [engine] = http.get("/ready").json()["engines"]
    assert engine["template"]["after_messages"] == "whole history"
    assert engine["template"]["after_results"] == "new messages"
    assert "earlier messages decide" in engine["template"]["reason"]


def test_whole_history_is_rendered_if_the_suffix_depends_on_it(
    http: httpx.Client, tokenizer: ChatTokenizer
) -> None:
    talk = Conversation(http, [user("Count.")], _answers("Fine."))
    before = talk.ask()
    assert before.ids[-1] == _STOP
    for count in (3, 5, 7):
        turn = talk.ask(user("More."))
        expected = f"\n<|im_start|>user\nMore.{_CLOSE}\n{count}<|im_start|>assistant\n"
        assert _extended_by(turn, before, tokenizer) == expected
        before = turn


def test_without_the_history_only_what_is_proved_is_appended(
    http: httpx.Client, tokenizer: ChatTokenizer
) -> None:
    ids = [1, _WORD, _STOP]
    body = {"prompt_ids": ids, "max_tokens": 1}
    for path in (TOKENS, "/tokenize"):
        refused = http.post(path, json={**body, "append_messages": [user("More.")]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "template_unsupported")
        assert "earlier messages decide" in refused.json()["error"]["message"]
    appended = http.post(TOKENS, json={**body, "append_messages": [_RESULT]})
    assert appended.status_code == 200, appended.text
    prompt = appended.json()["prompt_token_ids"]
    assert prompt[: len(ids)] == ids
    text = f"\n<|im_start|>tool\n17 °C{_CLOSE}\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt[len(ids) :]) == text


def test_token_route_with_the_history_is_exact(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    history = [user("Count here."), {"role": "assistant", "content": "Fine."}]
    ids = [1, _WORD, _STOP]
    body = {"prompt_ids": ids, "messages": history, "append_messages": [user("More.")], "max_tokens": 1}
    answer = http.post(TOKENS, json=body)
    assert (answer.status_code, answer.headers["x-prompt-source"]) == (200, "extended")
    prompt = answer.json()["prompt_token_ids"]
    assert prompt[: len(ids)] == ids
    text = f"\n<|im_start|>user\nMore.{_CLOSE}\n3<|im_start|>assistant\n"
    assert tokenizer.decode(prompt[len(ids) :]) == text


def test_turn_cut_off_before_a_close_that_begins_with_text(
    http: httpx.Client, tokenizer: ChatTokenizer
) -> None:
    talk = Conversation(http, [user("Ramble.")], forced(_WORD, 3))
    first = talk.ask()
    assert first.ids == [_WORD] * 3
    expected = f"{_CLOSE}\n<|im_start|>user\nMore.{_CLOSE}\n3<|im_start|>assistant\n"
    assert _extended_by(talk.ask(user("More.")), first, tokenizer) == expected


def test_turn_whose_text_changes_the_suffix_is_rendered(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """The chat route lets the engine render, with the reason; the token route refuses."""
    talk = Conversation(http, [user("Do you?")], _answers("yes"))
    first = talk.ask()
    assert talk.messages[-1]["content"] == "yes"
    body = {"prompt_ids": [*first.prompt_ids, *first.ids], "messages": list(talk.messages), "max_tokens": 1}
    refused = http.post(TOKENS, json={**body, "append_messages": [user("Because.")]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "template_unsupported")
    assert "depends on the text of the turn" in refused.json()["error"]["message"]
    second = talk.ask(user("Because."), **_answers("no"))
    assert second.source == "rendered: template_unsupported"
    assert second.prompt_ids == _rendered(http, talk.messages[:-1])
    assert "<|im_start|>system\nWhy?<|im_end|>" in tokenizer.decode(second.prompt_ids)
    # the next turn's text decides nothing
    expected = f"\n<|im_start|>user\nI see.{_CLOSE}\n5<|im_start|>assistant\n"
    assert _extended_by(talk.ask(user("I see.")), second, tokenizer) == expected


def test_messages_on_which_the_template_fails(http: httpx.Client) -> None:
    """A division by zero in the template is the client's error, with the history and without."""
    talk = Conversation(http, [user("Break it.")], forced(_WORD))
    first = talk.ask()
    ids = [*first.prompt_ids, *first.ids]
    boom = {**_RESULT, "content": "boom"}
    for path in (TOKENS, "/tokenize"):
        for new, history in (([boom], []), ([user("boom")], talk.messages), ([boom], talk.messages)):
            answer = http.post(path, json={"prompt_ids": ids, "messages": history, "append_messages": new})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "append_messages"), error
            assert "division by zero" in error["message"]
    answer = http.post(CHAT, json={"messages": [*talk.messages, user("boom")], "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400), answer.text
    assert continues(talk.ask(user("Not that.")), first)


def test_another_stop_token_replaces_the_close(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    talk = Conversation(http, [user("End at once.")], forced(_OTHER_STOP, 4))
    first = talk.ask()
    assert first.ids == [_OTHER_STOP]
    expected = f"\n<|im_start|>user\nMore.{_CLOSE}\n3<|im_start|>assistant\n"
    assert _extended_by(talk.ask(user("More.")), first, tokenizer) == expected
    suffixes = []
    for stop in (_STOP, _OTHER_STOP):
        ids = [1, _WORD, stop]
        body = {"prompt_ids": ids, "append_messages": [_RESULT]}
        answer = http.post("/tokenize", json=body).json()
        assert answer["tokens"][: len(ids)] == ids
        assert answer["appended"] == len(answer["tokens"]) - len(ids)
        suffixes.append(answer["tokens"][len(ids) :])
    assert suffixes[0] == suffixes[1]
    text = f"\n<|im_start|>tool\n17 °C{_CLOSE}\n<|im_start|>assistant\n"
    assert tokenizer.decode(suffixes[0]) == text


def test_appends_at_the_same_time_are_equal(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """32 threads send four kinds of appends that no request before has made, so that none is cached."""
    history = [user("All at once."), {"role": "assistant", "content": "Fine."}]
    ids = [1, _WORD]
    bodies: list[dict[str, Any]] = [
        {"messages": history, "append_messages": [user("Grüße 四, all of you.")]},
        {"messages": history, "append_messages": [user("Well."), user("All of you?")]},
        {"messages": history, "append_messages": [{**_RESULT, "content": "many results"}]},
        {"append_messages": [{**_RESULT, "content": "no history"}]},
    ]
    texts = [
        f"\n<|im_start|>user\nGrüße 四, all of you.{_CLOSE}\n3",
        f"\n<|im_start|>user\nWell.{_CLOSE}\n<|im_start|>user\nAll of you?{_CLOSE}\n4",
        f"\n<|im_start|>tool\nmany results{_CLOSE}\n",
        f"\n<|im_start|>tool\nno history{_CLOSE}\n",
    ]

    def append(index: int) -> list[int]:
        answer = http.post("/tokenize", json={"prompt_ids": ids, **bodies[index % len(bodies)]})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(append, range(32 * len(bodies))))
    for kind, text in enumerate(texts):
        alike = answers[kind :: len(bodies)]
        assert alike == [alike[0]] * 32
        assert alike[0][: len(ids)] == ids
        assert tokenizer.decode(alike[0][len(ids) :]) == f"{_CLOSE}{text}<|im_start|>assistant\n"


def test_audit_finds_a_difference_that_the_proof_missed(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """Last in this file: afterwards the whole history is rendered after tool results too."""
    talk = Conversation(http, [user(REFUTING_TEXT)], _answers("Fine."))
    first = talk.ask()
    body = {"prompt_ids": [1, _WORD, _STOP], "append_messages": [_RESULT]}
    assert http.post("/tokenize", json=body).status_code == 200
    second = talk.ask(_RESULT)
    assert "hidden" not in _extended_by(second, first, tokenizer)
    wait_until(lambda: _audits(http, "different") == 1)
    third = talk.ask({**_RESULT, "content": "18 °C"})
    expected = f"\n<|im_start|>tool\n18 °C{_CLOSE}\nhidden<|im_start|>assistant\n"
    assert _extended_by(third, second, tokenizer) == expected
    [engine] = http.get("/ready").json()["engines"]
    assert engine["template"]["after_results"] == "whole history"
    assert "audit" in engine["template"]["reason"]
    assert http.post("/tokenize", json=body).status_code == 501
    # the whole history is rendered now: nothing is left to audit
    assert _audits(http, "different") == 1


def _audits(http: httpx.Client, result: str) -> float:
    name = f'tokenproxy_append_audits_total{{result="{result}"}} '
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)
