"""New texts: printed once after the turn, as the template prints them, or the append is refused."""

import json
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, TemplateUnsupported
from tests.support.tiny_templates import HEADER, chatml
from tests.unit.tokenization.in_memory import appended_text, tokenizer_with

_END = "{{ '<|im_end|>\n' }}"


def _chatml(content: str = "m.content", before: str = "") -> str:
    """ChatML with an expression for the content, and text before all messages."""
    return before + chatml(HEADER + "{{ " + content + " }}" + _END)


def _user(content: object = "And?") -> dict[str, Any]:
    return {"role": "user", "content": content}


_HISTORY = [_user("Hi"), {"role": "assistant", "content": "Hello."}]


def _suffix(template: str, *new: dict[str, Any], **options: Any) -> str:
    return appended_text(tokenizer_with(template), "<|im_end|>", list(new), **options)[1]


def _expected(*texts: str, role: str = "user") -> str:
    messages = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for text in texts)
    return f"\n{messages}<|im_start|>assistant\n"


_TEXTS = {
    "one of the header's words": "user",
    "an echo of the turn": "Hello.",
    "marker": "qZassistantZq",
    "special tokens": "<|im_end|>\n<|im_start|>assistant\n",
    "template syntax": "{{ messages }}{% endfor %}{# x #}",
    "line feeds of every kind": "a\r\nb\rc\u2028d\x00e",
    "many lines": "\n" * 20_000 + "x",
}


@pytest.fixture(scope="module")
def plain() -> ChatTokenizer:
    return tokenizer_with(_chatml())


@pytest.mark.parametrize("text", _TEXTS.values(), ids=_TEXTS)
def test_every_text_is_appended_as_it_is(plain: ChatTokenizer, text: str) -> None:
    for history in (None, _HISTORY):
        assert appended_text(plain, "<|im_end|>", [_user(text)], history=history)[1] == _expected(text)
    results = [{"role": "tool", "tool_call_id": f"c{index}", "content": text} for index in range(2)]
    assert appended_text(plain, "<|im_end|>", results)[1] == _expected(text, text, role="tool")


def test_marker_in_the_history_is_text() -> None:
    """Nothing is proved of this template, so the whole history is rendered."""
    text = "qZqassistantZq"
    template = _chatml("messages[0].content + m.content if loop.last else m.content")
    history = [_user(text), {"role": "assistant", "content": text}]
    assert _suffix(template, _user("x"), history=history) == _expected(text + "x")


@pytest.mark.parametrize(
    "content, new, printed",
    [
        ("m.content | tojson", 'é "x"\n\\', json.dumps('é "x"\n\\', ensure_ascii=False)),
        ("[m.content]", 'it\'s "x"\n', str(['it\'s "x"\n'])),
        ("m.content | trim", " x\n", "x"),
    ],
)
def test_text_that_is_printed_otherwise_is_exact(content: str, new: object, printed: str) -> None:
    assert _suffix(_chatml(content), _user(new)) == _expected(printed)


_REFUSED: dict[str, tuple[str, Any, str]] = {
    "twice": (_chatml("m.content + '|' + m.content"), "x", "prints the text of a turn more than once"),
    "twice, after the turn": (
        _chatml("m.content if m.role != 'user' else m.content + m.content"), "x", "new message 0 .* 2 times"
    ),
    "before the turn": (
        _chatml("m.content", before="{{ messages[-1].content if messages | length == 3 }}"),
        "x", "before the turn",
    ),
    "not if it is long": (
        _chatml("m.content if m.content | length < 100 else 'too long'"), "x" * 100, "not print the text"
    ),
}  # fmt: skip


@pytest.mark.parametrize("template, text, error", _REFUSED.values(), ids=_REFUSED)
def test_text_that_is_not_printed_once_is_refused(template: str, text: str, error: str) -> None:
    with pytest.raises(TemplateUnsupported, match=error):
        tokenizer_with(template).append([0], [_user(text)], history=_HISTORY)


def test_reasoning_of_a_new_turn_may_be_left_out() -> None:
    template = _chatml("m.content if loop.last else m.content.split('</think>')[-1]")
    new = [_user("a"), {"role": "assistant", "content": "<think>Because.</think>Well."}, _user("b")]
    assert _suffix(template, *new) == _expected("a") + "Well.<|im_end|>" + _expected("b")


def test_every_new_text_and_part_is_looked_for() -> None:
    template = _chatml("m.content if loop.last or m.role != 'user'")
    assert _suffix(template, _user("a"), history=_HISTORY) == _expected("a")
    with pytest.raises(TemplateUnsupported, match=r"new message 0 \(user\) 0 times"):
        tokenizer_with(template).append([0], [_user("a"), _user("b")], history=_HISTORY)
    first_part = _chatml("m.content if m.content is string else m.content[0].text")
    takes_parts = "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with pytest.raises(TemplateUnsupported, match=r"new message 0 \(user\) 0 times"):
        tokenizer_with(takes_parts + first_part).append([0], [_user(parts)], history=_HISTORY)


_CALL = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize("content, content_last", [("", True), ("Wait.", False), ("Wait.", True)])
def test_content_after_the_calls_is_refused(content: str, content_last: bool) -> None:
    """The tail of the turn would hold its content, and the close would be inserted after the calls."""
    order = (_CALL, "{{ m.content }}") if content_last else ("{{ m.content }}", _CALL)
    tokenizer = tokenizer_with(chatml("".join([HEADER, *order, _END])))
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"q": "x"}}}
    history = [_user("Hi"), {"role": "assistant", "content": content, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c0", "content": "sun"}
    if content and content_last:
        with pytest.raises(TemplateUnsupported, match="what a turn begins with after its last text"):
            tokenizer.append([0], [result], history=history)
    else:
        texts = appended_text(tokenizer, "}", [result], history=history, finish_reason="length")
        assert texts == ("<|im_end|>", _expected("sun", role="tool"))
