"""Templates in which something unusual decides what follows a turn: it is seen, or the append is refused."""

from itertools import count
from typing import Any

import pytest

from chat_tokenizer import TemplateUnsupported
from tests.support.tiny_templates import MESSAGE, chatml
from tests.unit.tokenization.in_memory import SPECIAL, appended_text, tokenizer_with


def _noted_if(condition: str) -> str:
    """ChatML with a message of its own after some turns, which ends like the turn A."""
    note = "{{ '<|im_start|>system\nSay why: A<|im_end|>\n' }}"
    after = "{% if m.role == 'assistant' and not loop.last and " + condition + " %}" + note + "{% endif %}"
    return chatml(MESSAGE + after)


def _talk(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


_REST = "\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
_NOTED = "\n<|im_start|>system\nSay why: A<|im_end|>" + _REST


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize(
    "template, history, suffix",
    [
        (_noted_if("m.content.endswith('s')"), _talk("Hi", "No, never."), _REST),
        (_noted_if("m.content.endswith('s')"), _talk("Hi", "Yes"), None),
        (_noted_if("m.content|length < 5"), _talk("Hi", "Yes"), None),
        (_noted_if("messages|length > 4"), _talk("a", "b", "c", "d", "Hi", "A"), _NOTED),
        (_noted_if("messages|length > 4"), _talk("a", "b", "c", "d", "Hi", "B"), _NOTED),
        (chatml("{% if loop.index > 5 %}{% break %}{% endif %}" + MESSAGE), _talk(*"abcdef"), None),
    ],
)
def test_text_after_the_turn_is_that_of_this_conversation_or_refused(
    template: str, history: list[dict[str, Any]], suffix: str | None, proved: bool
) -> None:
    tokenizer = tokenizer_with(template)
    if proved:
        tokenizer.prove()
    if suffix is None:
        with pytest.raises(TemplateUnsupported):
            appended_text(tokenizer, "<|im_end|>", _talk("why"), history=history)
    else:
        assert appended_text(tokenizer, "<|im_end|>", _talk("why"), history=history) == ("", suffix)


def test_argument_of_a_call_decides() -> None:
    calls = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>\n"
    template = _noted_if("m.tool_calls and m.tool_calls[0].function.arguments.q == 'rm'")
    tokenizer = tokenizer_with(template.replace(MESSAGE, MESSAGE.replace(" + '<|im_end|>\n'", "") + calls))

    def append(argument: str) -> tuple[str, str]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": argument}}}
        history = [*_talk("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "c", "content": "sun"}
        return appended_text(tokenizer, "<|im_end|>", [result], history=history)

    append("ls")
    with pytest.raises(TemplateUnsupported, match="depends on the text of the turn"):
        append("rm")


def test_another_stop_token_replaces_only_the_close() -> None:
    """Neither for the end of a message that the template inserts, nor for the opening of the next."""
    note = "{% if not loop.first and m.role == 'user' %}{{ 'NOTE: be brief<|eot|>' }}{% endif %}"
    stops = ["<|im_end|>", "<|eot|>"]
    inserted = tokenizer_with(chatml(note + MESSAGE), special=[*SPECIAL, "<|eot|>"], stops=stops)
    opened = tokenizer_with(chatml("{% if m.role == 'user' %}<|eos|>{% endif %}" + MESSAGE))
    for tokenizer, stop, start in ((inserted, "<|eot|>", "\nNOTE"), (opened, "<|eos|>", "\n<|eos|>")):
        closed = appended_text(tokenizer, "<|im_end|>", _talk("why"), history=_talk("a", "b"))
        assert closed[1].startswith(start)
        assert appended_text(tokenizer, stop, _talk("why"), history=_talk("a", "b")) == closed


def test_each_of_several_templates_is_examined() -> None:
    loud = chatml("{% if style == 'loud' and not loop.first %}LOUD {% endif %}" + MESSAGE)
    tokenizer = tokenizer_with(chatml())
    tokenizer._tokenizer.chat_template = {"default": "{% set style = 1 %}" + chatml(), "tool_use": loud}
    tokenizer = tokenizer.with_content_format(None)
    tokenizer.prove()
    assert not tokenizer.is_local(_talk("why"), {"style": "new"})


def test_time_is_part_of_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tokenizer_with(chatml("{{ strftime_now('%H:%M:%S.%f') }}" + MESSAGE))
    render, readings = exact._tokenizer.apply_chat_template, count(0x4E00)
    # no two readings of this clock have a character in common; two of a real one may end with the same digit

    def with_clock(messages: Any, **arguments: Any) -> Any:
        return render(messages, strftime_now=lambda form: chr(next(readings)), **arguments)

    monkeypatch.setattr(exact._tokenizer, "apply_chat_template", with_clock)
    exact.prove()
    for _ in range(2):
        with pytest.raises(TemplateUnsupported):
            appended_text(exact, "<|im_end|>", _talk("why"), history=_talk("a", "b"))
