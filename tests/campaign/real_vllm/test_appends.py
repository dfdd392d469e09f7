"""Appends after a template that needs more than the last turn, on real engines that run with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import (
    FRONT,
    INSIDE,
    START_TIMEOUT_S,
    checkpoint_with,
    run_proxy,
    start_engine,
    wait_ready,
)
from tests.campaign.real_vllm.plain import Conversation, Message, Turn, continues, forced, user
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
    "{{ '<|im_start|>' + m.role + '\n' + m.content + ' [END]<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if 'tool' not in messages | map(attribute='role') %}{{ messages | length }}{% endif %}"
    "{% if (messages[0].content | length) == 41 %}{{ 'hidden' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CLOSE = " [END]<|im_end|>"
_STOP, _OTHER_STOP = 2, 0
"""Ids of `<|im_end|>`, and of `<|endoftext|>`, which ends turns too."""
_RESULT: Message = {"role": "tool", "tool_call_id": "a", "content": "17 °C"}


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def http(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server whose engine runs with the template, and with two EOS, as many models have."""
    folder = tmp_path_factory.mktemp("appends")
    template = str(folder / "template.jinja")
    Path(template).write_text(_TEMPLATE)
    name = "generation_config.json"
    config = {**json.loads((model / name).read_text()), "eos_token_id": [_STOP, _OTHER_STOP]}
    two_stops = checkpoint_with(model, folder / "model", name, config)
    inside = request.param == INSIDE
    flags = ("--chat-template", template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))  # proofs of its own, because the audit changes them
        with start_engine(two_stops, folder / "vllm.log", *flags, plugin=inside) as engine:
            engine.wait_ready(START_TIMEOUT_S)
            if inside:
                yield from _client(engine.url)
            else:
                with run_proxy(engine.url, *flags, "--store", "memory:") as url:
                    yield from _client(url)


def _client(url: str) -> Iterator[httpx.Client]:
    wait_ready(url)
    with httpx.Client(base_url=url, timeout=120) as client:
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


def test_another_stop_token_replaces_the_close(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    talk = Conversation(http, [user("End at once.")], forced(_OTHER_STOP, 4))
    first = talk.ask()
    assert first.ids == [_OTHER_STOP]
    expected = f"\n<|im_start|>user\nMore.{_CLOSE}\n3<|im_start|>assistant\n"
    assert _extended_by(talk.ask(user("More.")), first, tokenizer) == expected


def test_audit_finds_a_difference_that_the_proof_missed(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """Last in this file: afterwards the whole history is rendered after tool results too."""
    talk = Conversation(http, [user(REFUTING_TEXT)], _answers("Fine."))
    first = talk.ask()
    second = talk.ask(_RESULT)
    assert "hidden" not in _extended_by(second, first, tokenizer)
    wait_until(lambda: _audits(http, "different") == 1)
    third = talk.ask({**_RESULT, "content": "18 °C"})
    expected = f"\n<|im_start|>tool\n18 °C{_CLOSE}\nhidden<|im_start|>assistant\n"
    assert _extended_by(third, second, tokenizer) == expected
    [engine] = http.get("/ready").json()["engines"]
    assert engine["template"]["after_results"] == "whole history"
    assert "audit" in engine["template"]["reason"]
    # the whole history is rendered now: nothing is left to audit
    assert _audits(http, "different") == 1


def _audits(http: httpx.Client, result: str) -> float:
    name = f'tokenproxy_append_audits_total{{result="{result}"}} '
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)
