"""Templates in which something unusual decides what follows a turn: it is seen, or the append is refused."""

import random
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.tokenization.in_memory import SPECIAL, appended_text, tokenizer_with
from tokenization import InvalidMessages, TemplateUnsupported

_MESSAGE = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def _chatml(before: str = "", after: str = "", message: str = _MESSAGE) -> str:
    return "{% for m in messages %}" + before + message + after + "{% endfor %}" + _PROMPT


def _user(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def _turn(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


_RESULT = {"role": "tool", "tool_call_id": "c", "content": "sun"}
_NOTE = "{{ '<|im_start|>system\nSay why: A<|im_end|>\n' }}"
_IF_TURN = "{% if m.role == 'assistant' and not loop.last and CONDITION %}" + _NOTE + "{% endif %}"
_REST = "\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
_NOTED = "\n<|im_start|>system\nSay why: A<|im_end|>" + _REST


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("condition", ["m.content.endswith('s')", "m.content|length < 5"])
def test_text_of_the_turn_decides(proved: bool, condition: str) -> None:
    tokenizer = tokenizer_with(_chatml(after=_IF_TURN.replace("CONDITION", condition)))
    if proved:
        tokenizer.prove()
    long, short = [_user("Hi"), _turn("No, never.")], [_user("Hi"), _turn("Yes")]
    assert appended_text(tokenizer, "<|im_end|>", [_user("why")], history=long) == ("", _REST)
    with pytest.raises(TemplateUnsupported, match="depends on the text of the turn"):
        appended_text(tokenizer, "<|im_end|>", [_user("why")], history=short)


def test_argument_of_a_call_decides() -> None:
    condition = "m.tool_calls and m.tool_calls[0].function.arguments.q == 'rm'"
    calls = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>\n"
    message = _MESSAGE.replace(" + '<|im_end|>\n'", "") + calls
    tokenizer = tokenizer_with(_chatml(message=message, after=_IF_TURN.replace("CONDITION", condition)))

    def append(argument: str) -> tuple[str, str]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": argument}}}
        history = [_user("Hi"), _turn("", tool_calls=[call])]
        return appended_text(tokenizer, "<|im_end|>", [_RESULT], history=history)

    append("ls")
    with pytest.raises(TemplateUnsupported, match="depends on the text of the turn"):
        append("rm")


def test_message_that_ends_like_the_turn_is_inserted_in_long_conversations() -> None:
    tokenizer = tokenizer_with(_chatml(after=_IF_TURN.replace("CONDITION", "messages|length > 4")))
    earlier = [_user("a"), _turn("b"), _user("c"), _turn("d")]
    for content in ("A", "B"):
        history = [*earlier, _user("Hi"), _turn(content)]
        assert appended_text(tokenizer, "<|im_end|>", [_user("why")], history=history) == ("", _NOTED)


def test_another_stop_token_replaces_only_the_close() -> None:
    """Neither for the end of a message that the template inserts, nor for the opening of the next."""
    note = "{% if not loop.first and m.role == 'user' %}{{ 'NOTE: be brief<|eot|>' }}{% endif %}"
    stops = ["<|im_end|>", "<|eot|>"]
    inserted = tokenizer_with(_chatml(before=note), special=[*SPECIAL, "<|eot|>"], stops=stops)
    history = [_user("a"), _turn("b")]
    closed = appended_text(inserted, "<|im_end|>", [_user("why")], history=history)
    assert "NOTE" in closed[1]
    assert appended_text(inserted, "<|eot|>", [_user("why")], history=history) == closed
    opened = tokenizer_with(_chatml(before="{% if m.role == 'user' %}<|eos|>{% endif %}"))
    closed = appended_text(opened, "<|im_end|>", [_user("why")], history=history)
    assert closed[1].startswith("\n<|eos|><|im_start|>user")
    assert appended_text(opened, "<|eos|>", [_user("why")], history=history) == closed


def test_conversation_that_is_cut_is_refused() -> None:
    tokenizer = tokenizer_with(_chatml(before="{% if loop.index > 5 %}{% break %}{% endif %}"))
    earlier = [_user("a"), _turn("b"), _user("c"), _turn("d")]
    with pytest.raises(TemplateUnsupported):
        appended_text(tokenizer, "<|im_end|>", [_user("why")], history=[*earlier, _user("Hi"), _turn("e")])


@pytest.mark.parametrize("text", ["yes", "assistant"])
def test_repeated_message_that_is_dropped_is_refused(text: str) -> None:
    """The header of a dropped message may hold its text."""
    seen = "{% set ns = namespace(seen=[]) %}"
    once = (
        "{% if m.content not in ns.seen %}"
        + _MESSAGE
        + "{% endif %}{% set ns.seen = ns.seen + [m.content] %}"
    )
    tokenizer = tokenizer_with(seen + _chatml(message=once))
    history = [_user(text), _turn("b"), _user("c"), _turn("d")]
    with pytest.raises(TemplateUnsupported):
        appended_text(tokenizer, "<|im_end|>", [_user(text)], history=history)
    with pytest.raises(TemplateUnsupported):
        appended_text(tokenizer, "<|im_end|>", [_user("new"), _user("new")], history=[_user("a"), _turn("b")])


def test_each_of_several_templates_is_examined() -> None:
    loud = _chatml(before="{% if style == 'loud' and not loop.first %}LOUD {% endif %}")
    tokenizer = tokenizer_with(_chatml())
    tokenizer._tokenizer.chat_template = {"default": "{% set style = 1 %}" + _chatml(), "tool_use": loud}
    tokenizer = tokenizer.with_content_format(None)
    tokenizer.prove()
    assert not tokenizer.is_local([_user("why")], {"style": "new"})


def test_time_is_part_of_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = tokenizer_with(_chatml(before="{{ strftime_now('%H:%M:%S.%f') }}"))
    render, readings = exact._tokenizer.apply_chat_template, count(0x4E00)
    # no two readings of this clock have a character in common; two of a real one may end with the same digit

    def with_clock(messages: Any, **arguments: Any) -> Any:
        return render(messages, strftime_now=lambda form: chr(next(readings)), **arguments)

    monkeypatch.setattr(exact._tokenizer, "apply_chat_template", with_clock)
    exact.prove()
    for _ in range(2):
        with pytest.raises(TemplateUnsupported):
            appended_text(exact, "<|im_end|>", [_user("why")], history=[_user("a"), _turn("b")])


def test_text_like_a_marker_needs_no_more_renderings_or_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, history = random.getrandbits, [_user("a"), _turn("b")]
    counts = []
    for text in ("x" + "y" * 30_000, "qZ" + "q" * 30_000, "qZassistantZq" * 2_000):
        tokenizer = tokenizer_with(_chatml())
        renderings = Mock(wraps=tokenizer._tokenizer.apply_chat_template)
        candidates = Mock(wraps=draw)
        monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", renderings)
        monkeypatch.setattr(random, "getrandbits", candidates)
        assert text in appended_text(tokenizer, "<|im_end|>", [_user(text)], history=history)[1]
        counts.append((renderings.call_count, candidates.call_count))
    assert counts == [counts[0]] * 3
    assert max(counts[0]) < 20


_CYCLE = _user("why")
_CYCLE["extra"] = _CYCLE


@pytest.mark.parametrize(
    "wrong",
    [
        {"history": iter([_user("a"), _turn("b")])},
        {"new_messages": [_CYCLE]},
        {"tools": 5},
        {"template_kwargs": "abc"},
        {"tools": [{("a", "b"): object()}]},
    ],
)
def test_wrong_types_are_typed_errors(wrong: dict[str, Any]) -> None:
    arguments = {"new_messages": [_user("why")], "history": [_user("a"), _turn("b")], **wrong}
    with pytest.raises(InvalidMessages):
        tokenizer_with(_chatml()).append([1], **arguments)
