"""What the proof finds out about small templates, each with one dependence."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.tokenization.in_memory import appended_text, tokenizer_with
from tokenization import TemplateUnsupported, TokenizationError, locality
from tokenization.histories import user
from tokenization.locality import Locality, Proof
from tokenization.turns import RenderOptions

NEW, TURN, HISTORY = Locality.NEW, Locality.TURN, Locality.HISTORY
_HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
_TURN = _HEADER + "{{ m.content + '<|im_end|>\n' }}"
_LOOP = "{% for m in messages %}" + _TURN + "{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CHATML = _LOOP + _PROMPT
_LAST_USER = (
    "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.text = m.content %}{% endif %}{% endfor %}"
)


def _prompt_if(condition: str) -> str:
    """ChatML whose generation prompt depends on a condition."""
    return _CHATML + "{% if add_generation_prompt and (" + condition + ") %}{{ '<think>' }}{% endif %}"


def _next_to_result(expression: str) -> str:
    """ChatML that prints something before the content of each tool result."""
    result = "{% if m.role == 'tool' %}{{ " + expression + " }}{% endif %}"
    return (
        "{% for m in messages %}"
        + _HEADER
        + result
        + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT
    )


def _any_call(condition: str) -> str:
    """ChatML whose generation prompt depends on a condition that any call of the conversation may meet."""
    return (
        "{% set ns = namespace(found=false) %}{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{% if "
        + condition
        + " %}{% set ns.found = true %}{% endif %}{% endfor %}{% endfor %}"
        + _prompt_if("ns.found")
    )


_EARLIER = "earlier messages decide what is printed"
# (template, what decides after results, what decides after other messages, a part of the reason)
_TEMPLATES: dict[str, tuple[str, Locality, Locality, str]] = {
    "ChatML": (_CHATML, NEW, NEW, r"^$"),
    "system text in the last user message": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
        "{% for m in messages %}" + _HEADER + "{% if loop.last and m.role == 'user' and system is defined %}"
        "{{ system + '\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _PROMPT,
        HISTORY,  # also a user message may follow the results
        HISTORY,
        f"^{_EARLIER}: user after system 'qw'",
    ),
    "/no_think in the system message": (
        _prompt_if("messages[0].role == 'system' and '/no_think' in messages[0].content"),
        HISTORY,
        HISTORY,
        f"{_EARLIER}: tool after system '/no_think'",
    ),
    "/no_think in any user message": (
        "{% set ns = namespace(off=false) %}{% for m in messages %}"
        "{% if m.role == 'user' and '/no_think' in m.content %}{% set ns.off = true %}{% endif %}{% endfor %}"
        + _prompt_if("ns.off"),
        HISTORY,
        HISTORY,
        f"{_EARLIER}: user after user '/no_think'",
    ),
    "only the last user message": (
        _LAST_USER + _prompt_if("'/no_think' in ns.text"),
        HISTORY,
        NEW,
        "tool after",
    ),
    "index of earlier calls": (
        "{% set ns = namespace(count=0) %}{% for m in messages %}"
        + _HEADER
        + "{% if m.role == 'tool' %}{% set ns.count = ns.count + 1 %}{{ ns.count }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + _PROMPT,
        HISTORY,
        NEW,
        f"^{_EARLIER}: tool after",
    ),
    "parity of loop.index": (
        "{% for m in messages %}{{ '<|im_start|>' + loop.cycle('a', 'b') }}"
        + _TURN
        + "{% endfor %}"
        + _PROMPT,
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "number of messages": (_prompt_if("messages | length > 20"), HISTORY, HISTORY, _EARLIER),
    "number of messages, with a fraction": (
        _prompt_if("messages | length > 20.5"),
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "length of a text": (_prompt_if("messages[0].content | length > 100"), HISTORY, HISTORY, _EARLIER),
    "name of the called function": (
        _next_to_result("loop.previtem.tool_calls[0].function.name if loop.previtem.tool_calls else ''"),
        TURN,
        NEW,
        r"the last turn decides what is printed: tool after user 'qw', assistant with calls ''",
    ),
    "arguments of the first call": (
        "{% for m in messages %}" + _HEADER + "{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{% if m.role == 'tool' and loop.previtem.tool_calls %}"
        "{{ loop.previtem.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _PROMPT,
        HISTORY,
        NEW,
        _EARLIER,
    ),
    "content of the first message": (_next_to_result("messages[0].content"), HISTORY, NEW, _EARLIER),
    "close of a turn with calls": (
        "{% for m in messages %}" + _HEADER + "{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{{ '<|eos|>' if m.tool_calls else '<|im_end|>' }}"
        "{% endfor %}" + _PROMPT,
        TURN,  # a result may follow a turn without calls
        TURN,
        "^the last turn decides what is printed: user after user 'qw', assistant with calls ''",
    ),
    "roles must alternate": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + _TURN + "{% endfor %}" + _PROMPT,
        HISTORY,
        NEW,
        "^the template refuses tool results after a turn: nothing is proved$",
    ),
    "truth of a template argument": (
        _prompt_if("keep and messages | length > 4"),
        HISTORY,
        HISTORY,
        f"{_EARLIER} with keep=True: ",
    ),
    "value of a template argument": (
        _prompt_if("mode == 'old' and messages | length > 4"),
        HISTORY,
        HISTORY,
        f"{_EARLIER} with mode='old': ",
    ),
    "system message, if tools are declared": (
        _prompt_if("tools and '/no_think' in messages[0].content"),
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "system message, if the new text asks for it": (
        _prompt_if("messages[0].role == 'system' and messages[-1].content == '/think'"),
        HISTORY,
        HISTORY,
        "user after system 'qw'",
    ),
    "string that occurs three times": (
        _prompt_if("messages[0].content.count('/x') > 2"),
        HISTORY,
        HISTORY,
        "'qw /x /x /x qw'",
    ),
    "member of a list": (
        "{% for m in messages %}"
        + _TURN
        + "{% endfor %}"
        + _PROMPT
        + "{% if add_generation_prompt and messages[0].content in ['/a', '/b'] %}{{ '<think>' }}{% endif %}",
        HISTORY,
        HISTORY,
        f"{_EARLIER}: user after system '/a'",
    ),
    "role of its own": (
        _prompt_if("messages[0].role == 'context'"),
        HISTORY,
        HISTORY,
        "user after context 'qw'",
    ),
    "reasoning of earlier turns": (
        _prompt_if("messages | selectattr('reasoning_content') | list | length > 1"),
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "end of the turn's text": (
        _prompt_if("messages | length > 1 and messages[-2].content.endswith('?')"),
        NEW,
        HISTORY,
        "the text of the turn decides what is printed: user after user 'qw', assistant 'qw [?]'",
    ),
    "length of the turn's text": (
        _prompt_if("messages | length > 1 and messages[-2].content | length > 40"),
        NEW,
        HISTORY,
        _EARLIER,
    ),
    "text that was used before": (
        _prompt_if("messages[0].content == messages[-1].content"),
        HISTORY,
        HISTORY,
        "user after user 'qn'",
    ),
    "reasoning after the content": (
        "{% for m in messages %}"
        + _HEADER
        + "{{ m.content ~ (m.reasoning or '') + '<|im_end|>\n' }}{% endfor %}"
        + _PROMPT,
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "string in earlier reasoning": (
        _prompt_if("messages | selectattr('reasoning_content', 'equalto', '/x') | list"),
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "name of an earlier call": (_any_call("call.function.name == 'search'"), HISTORY, HISTORY, _EARLIER),
    "argument of an earlier call": (
        _any_call("'deep' in call.function.arguments"),
        HISTORY,
        HISTORY,
        _EARLIER,
    ),
    "name of the result": (_next_to_result("m.name or 'nameless'"), NEW, NEW, "^$"),
    "required template argument": (
        "{% if not date %}{{ raise_exception('no date') }}{% endif %}"
        + _prompt_if("'/no_think' in messages[0].content"),
        HISTORY,
        HISTORY,
        "the template refuses tool results after a turn: nothing is proved",
    ),
    "refuses everything": (
        "{{ raise_exception('no') }}",
        HISTORY,
        HISTORY,
        "the template refuses other messages after a turn: nothing is proved",
    ),
    "huge number": (
        _prompt_if("messages | length > 10 ** 30"),
        HISTORY,
        HISTORY,
        "^its source compares with a number above 128, too large to try$",
    ),
    "too many strings": (
        _CHATML + "{% if x in " + repr([f"s{number}" for number in range(151)]) + " %}{% endif %}",
        HISTORY,
        HISTORY,
        "^its source compares with 151 strings, too many to try$",
    ),
}


@pytest.mark.parametrize("template, results, messages, reason", _TEMPLATES.values(), ids=_TEMPLATES)
def test_locality_of_a_template(template: str, results: Locality, messages: Locality, reason: str) -> None:
    proof = tokenizer_with(template).prove()
    assert (proof.after_results, proof.after_messages) == (results, messages), proof.reason
    assert re.search(reason, proof.reason)


def test_proof_tells_results_from_other_messages() -> None:
    proof = Proof(TURN, NEW)
    result, question = {"role": "tool", "content": "a"}, user()
    assert proof.locality([result, question]) is TURN
    assert proof.locality([question, result]) is NEW
    assert proof.locality([]) is NEW


def test_proof_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "MAX_SECONDS", -1.0)
    proof = tokenizer_with(_CHATML).prove()
    assert proof == Proof(HISTORY, HISTORY, "the proof was not complete after -1 s", complete=False)


def test_threads_that_prove_at_once_make_one_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[Proof] = []

    def prove(*arguments: Any) -> Proof:
        proofs.append(locality.prove(*arguments))
        return proofs[-1]

    monkeypatch.setattr("tokenization.discovery.prove", prove)
    tokenizer = tokenizer_with(_CHATML)
    assert tokenizer.proof is None
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: tokenizer.prove(), range(8)))
    assert len(proofs) == 1
    assert all(proof is proofs[0] for proof in found)
    assert tokenizer.proof is proofs[0]


_SYSTEM = {"role": "system", "content": "/no_think"}
_HISTORY = [_SYSTEM, user("Hi"), {"role": "assistant", "content": "Hello."}]
_REST = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("prove_first", [False, True])
def test_history_is_rendered_where_it_decides(prove_first: bool) -> None:
    tokenizer = tokenizer_with(_prompt_if("'/no_think' in messages[0].content"))
    if prove_first:
        tokenizer.prove()
    assert appended_text(tokenizer, "<|im_end|>", [user("And?")], history=_HISTORY) == ("", _REST + "<think>")
    assert appended_text(tokenizer, "<|im_end|>", [user("And?")], history=_HISTORY[1:]) == ("", _REST)


def test_history_is_required_where_it_decides() -> None:
    tokenizer = tokenizer_with(_prompt_if("'/no_think' in messages[0].content"))
    with pytest.raises(TemplateUnsupported, match=r"give `history` .*user after system '/no_think'"):
        tokenizer.append([1], [user("And?")])


def test_tail_that_depends_on_the_text_of_the_turn_is_refused() -> None:
    """The marker after the turn's text hides its end from the template."""
    tokenizer = tokenizer_with(_prompt_if("messages[-2].content.endswith('?')"))
    history = [user("Hi"), {"role": "assistant", "content": "Hello?"}]
    with pytest.raises(TemplateUnsupported, match="depends on the text of the turn"):
        tokenizer.append([1], [user("And?")], history=history)
    assert appended_text(tokenizer, "<|im_end|>", [user("And?")], history=_HISTORY) == ("", _REST)


def test_audit_compares_with_the_turn_as_it_is() -> None:
    """What no marker shows and no history of the proof has: here a turn whose text is a number."""
    tokenizer = tokenizer_with(_prompt_if("messages | length > 1 and messages[-2].content.isdigit()"))
    assert tokenizer.prove().after_messages is NEW
    history: list[dict[str, Any]] = [user("Hi"), {"role": "assistant", "content": "Hello."}]
    options = RenderOptions(None, True, {})
    assert tokenizer._discovery.refutation([user("And?")], history, options) is None
    history[1]["content"] = "17"
    assert tokenizer._discovery.refutation([user("And?")], history, options) is not None
    assert tokenizer.prove().after_messages is HISTORY


def test_close_that_depends_on_the_history() -> None:
    close = "{{ 'no more to say' * 5 if '/no_think' in messages[0].content }}{{ '<|im_end|>\n' }}"
    turn = _HEADER + "{{ m.content }}" + close
    tokenizer = tokenizer_with("{% for m in messages %}" + turn + "{% endfor %}" + _PROMPT)
    texts = appended_text(tokenizer, "<|im_end|>", [user("And?")], history=_HISTORY)
    assert texts == ("", _REST.replace("And?", "And?" + "no more to say" * 5))


def _texts_rendered(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], tokenizer: Any) -> str:
    """The text of all messages that are rendered meanwhile."""
    rendered: list[object] = []
    plain = tokenizer._tokenizer.apply_chat_template

    def render(messages: object, **options: Any) -> object:
        rendered.append(messages)
        return plain(messages, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer._tokenizer, "apply_chat_template", render)
        action()
    return repr(rendered)


@pytest.mark.parametrize(
    "template, prove_first, rendered",
    [(_CHATML, True, False), (_CHATML, False, True), (_prompt_if("'/x' in messages[0].content"), True, True)],
)
def test_history_is_not_rendered_where_that_is_proved(
    monkeypatch: pytest.MonkeyPatch, template: str, prove_first: bool, rendered: bool
) -> None:
    tokenizer = tokenizer_with(template)
    if prove_first:
        tokenizer.prove()
    texts = _texts_rendered(
        monkeypatch, lambda: tokenizer.append([1], [user("And?")], history=_HISTORY), tokenizer
    )
    assert "And?" in texts
    assert ("/no_think" in texts) is rendered


def test_turn_that_is_refused_alone_is_rendered_with_its_history() -> None:
    tokenizer = tokenizer_with(
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + _CHATML
    )
    tokenizer.prove()
    assert appended_text(tokenizer, "<|im_end|>", [user("And?")], history=_HISTORY) == ("", _REST)
    with pytest.raises(TokenizationError):
        tokenizer.append([1], [user("And?")], history=_HISTORY[1:])
