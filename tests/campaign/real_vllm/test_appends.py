"""Appends after a template that needs more than the last turn, on real engines that run with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chat_tokenizer import ChatTokenizer
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, WAYS, run_way
from tests.support.scraping import Scrape
from tests.support.talk import Answered, Conversation, Message, user
from tests.support.tiny_templates import REFUTING_TEXT
from tests.support.utils import wait_until

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
_OTHER_STOP = 0
"""Id of `<|endoftext|>`, which ends turns too."""
_RESULT: Message = {"role": "tool", "tool_call_id": "a", "content": "17 °C"}
_FINE: dict[str, Any] = {"structured_outputs": {"choice": ["Fine."]}, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module", params=WAYS)
def http(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server whose engine runs with the template, and with two EOS, as many models have."""
    folder = tmp_path_factory.mktemp("appends")
    template, two_stops = folder / "template.jinja", folder / "model"
    template.write_text(_TEMPLATE)
    two_stops.mkdir()
    for file in model.iterdir():
        if file.name != "generation_config.json":
            (two_stops / file.name).symlink_to(file)
    config = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": [2, _OTHER_STOP]}
    (two_stops / "generation_config.json").write_text(json.dumps(config))
    flags = ("--chat-template", str(template))
    log = folder / "vllm.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))  # proofs of its own, because the audit changes them
        with (
            run_way(request.param, two_stops, log, *flags, proxy_flags=flags) as url,
            httpx.Client(base_url=url, timeout=120) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    """To spell ids out."""
    return ChatTokenizer.load(model)


def _extended_by(turn: Answered, before: Answered, tokenizer: ChatTokenizer) -> str:
    """The text of what was appended to all that the turn before consumed and sampled."""
    assert turn.continues(before), turn.source
    return tokenizer.decode(turn.prompt_ids[len(before.prompt_ids) + len(before.ids) :])


def test_whole_history_is_rendered_if_the_suffix_depends_on_it(
    http: httpx.Client, tokenizer: ChatTokenizer
) -> None:
    talk = Conversation(http, [user("Count.")], _FINE)
    before = talk.ask()
    for count in (3, 5):
        turn = talk.ask(user("More."))
        expected = f"\n<|im_start|>user\nMore.{_CLOSE}\n{count}<|im_start|>assistant\n"
        assert _extended_by(turn, before, tokenizer) == expected
        before = turn


def test_another_stop_token_replaces_the_close(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    forced = {"logit_bias": {str(_OTHER_STOP): 100.0}, "max_tokens": 4, "temperature": 0}
    talk = Conversation(http, [user("End at once.")], forced)
    first = talk.ask()
    assert first.ids == [_OTHER_STOP]
    expected = f"\n<|im_start|>user\nMore.{_CLOSE}\n3<|im_start|>assistant\n"
    assert _extended_by(talk.ask(user("More.")), first, tokenizer) == expected


def test_audit_finds_a_difference_that_the_proof_missed(http: httpx.Client, tokenizer: ChatTokenizer) -> None:
    """Last in this file: afterwards the whole history is rendered after tool results too."""
    talk = Conversation(http, [user(REFUTING_TEXT)], _FINE)
    first = talk.ask()
    second = talk.ask(_RESULT)
    assert "hidden" not in _extended_by(second, first, tokenizer)
    wait_until(lambda: Scrape(http).value("append_audits_total", result="different") == 1)
    third = talk.ask({**_RESULT, "content": "18 °C"})
    expected = f"\n<|im_start|>tool\n18 °C{_CLOSE}\nhidden<|im_start|>assistant\n"
    assert _extended_by(third, second, tokenizer) == expected
    [engine] = http.get("/ready").json()["engines"]
    assert engine["template"]["after_results"] == "whole history"
