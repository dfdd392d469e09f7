"""What the proof finds out about small templates, each with one dependence."""

import re
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer.histories import user
from chat_tokenizer.history_size import HistorySize
from chat_tokenizer.proof import Locality, Proof, load_proof, prove, store_proof
from chat_tokenizer.renderer import RenderOptions
from tests.support.tiny_templates import HEADER, LOCAL, MESSAGE, chatml
from tests.unit.tokenization.in_memory import tokenizer_with

NEW, TURN, HISTORY = Locality.NEW, Locality.TURN, Locality.HISTORY
_LAST_USER = (
    "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.text = m.content %}{% endif %}{% endfor %}"
)


def _prompt_if(condition: str) -> str:
    """ChatML whose generation prompt depends on a condition."""
    return LOCAL + "{% if add_generation_prompt and (" + condition + ") %}{{ '<think>' }}{% endif %}"


def _next_to_result(expression: str) -> str:
    """ChatML that prints something before the content of each tool result."""
    result = "{% if m.role == 'tool' %}{{ " + expression + " }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    return chatml(HEADER + result)


_CALLS = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
_EARLIER = "earlier messages decide what is printed"
# a condition on which the generation prompt depends, and the history that the reason names
_CONDITIONS = {
    "messages[0].role == 'system' and '/no_think' in messages[0].content": "tool after system '/no_think'",
    "messages | length == 34": "",
    "mode == 'old' and messages | length > 4": "with mode='old': ",
    "messages[0].role == 'system' and messages[-1].content == '/think'": "user after system 'qw'",
    "messages[0].content.count('/x') > 2": "'qw /x /x /x qw'",
    "messages | selectattr('reasoning_content', 'equalto', '/x') | list": "",
    "messages[0].content == messages[-1].content": "user after user 'qn'",
    "messages[:-1] | selectattr('role', 'equalto', 'user') | list == []": "after assistant",
    "messages[0].role == 'tool'": "after tool 'qr', assistant",
}


@pytest.mark.parametrize("condition, history", _CONDITIONS.items())
def test_condition_on_the_history_is_found(condition: str, history: str) -> None:
    proof = tokenizer_with(_prompt_if(condition)).prove()
    assert (proof.after_results, proof.after_messages) == (HISTORY, HISTORY)
    assert _EARLIER in proof.reason and history in proof.reason


# (template, what decides after results, what decides after other messages, a part of the reason)
_TEMPLATES: dict[str, tuple[str, Locality, Locality, str]] = {
    "name of the result": (_next_to_result("m.name or 'nameless'"), NEW, NEW, r"^$"),
    "only the last user message": (
        _LAST_USER + _prompt_if("'/no_think' in ns.text"), HISTORY, NEW, f"{_EARLIER}: tool after"
    ),

    "name of the called function": (
        _next_to_result("loop.previtem.tool_calls[0].function.name if loop.previtem.tool_calls else ''"),
        TURN, NEW, r"the last turn decides what is printed: tool after user 'qw', assistant with calls ''",
    ),
    "close of a turn with calls": (
        chatml(HEADER + _CALLS + "{{ '<|eos|>' if m.tool_calls else '<|im_end|>' }}"),
        # a result may follow a turn without calls
        TURN, TURN, "^the last turn decides what is printed: user after user 'qw', assistant with calls ''",
    ),
    "roles must alternate": (
        chatml(
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}" + MESSAGE
        ),
        HISTORY, NEW, "^the template refuses tool results after a turn: nothing is proved$",
    ),
    "end of the turn's text": (
        _prompt_if("messages | length > 1 and messages[-2].content.endswith('?')"),
        NEW, HISTORY, r"the text of the turn decides what is printed: .*, assistant 'qw [?]'",
    ),
    "huge number": (_prompt_if("messages | length > 10 ** 30"), HISTORY, HISTORY, "above 128 together"),
    "too many strings": (
        LOCAL + "{% if x in " + repr([f"s{number}" for number in range(151)]) + " %}{% endif %}",
        HISTORY, HISTORY, "^its source compares with 151 strings, too many to try$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("template, results, messages, reason", _TEMPLATES.values(), ids=_TEMPLATES)
def test_locality_of_a_template(template: str, results: Locality, messages: Locality, reason: str) -> None:
    proof = tokenizer_with(template).prove()
    assert (proof.after_results, proof.after_messages) == (results, messages), proof.reason
    assert re.search(reason, proof.reason)


def test_proof_that_takes_too_long_is_given_up() -> None:
    tokenizer = tokenizer_with(LOCAL)
    proof = prove(tokenizer._discovery.tails, tokenizer._template.syntax, -1.0)
    assert proof == Proof(HISTORY, HISTORY, "the proof was not complete after -1 s", complete=False)


def test_refutations_of_two_processes_are_both_kept(tmp_path: Path) -> None:
    store_proof(tmp_path, "key", Proof(HISTORY, NEW, "one"))
    store_proof(tmp_path, "key", Proof(NEW, HISTORY, "two"))
    stored = load_proof(tmp_path, "key")
    assert stored is not None
    assert (stored.after_results, stored.after_messages) == (HISTORY, HISTORY)


_SYSTEM = {"role": "system", "content": "/no_think"}
_HISTORY = [_SYSTEM, user("Hi"), {"role": "assistant", "content": "Hello."}]
_REST = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_audit_compares_with_the_turn_as_it_is() -> None:
    """What no marker shows and no history of the proof has: here a turn whose second letter comes twice."""
    turn = "messages[-2].content"
    repeats = f"messages | length > 1 and {turn}[2:3] and {turn}[1:2] == {turn}[2:3]"
    tokenizer = tokenizer_with(_prompt_if(repeats))
    assert tokenizer.prove().after_messages is NEW
    tokenizer._discovery.computed = HistorySize(0, 0)
    history: list[dict[str, Any]] = [user("Hi"), {"role": "assistant", "content": "Hello."}]
    options = RenderOptions(None, True, {})
    assert tokenizer._discovery.refutation([user("And?")], history, options) is None
    history[1]["content"] = "Meet"
    assert tokenizer._discovery.refutation([user("And?")], history, options) is not None
    assert tokenizer.prove().after_messages is HISTORY
