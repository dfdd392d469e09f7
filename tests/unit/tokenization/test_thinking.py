"""Which reasoning of earlier turns a template leaves out."""

from typing import Any

import pytest

from tests.unit.tokenization.in_memory import tokenizer_with
from tokenization.thinking import ends_thinking, hidden_reasoning

_OPEN, _CLOSE = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "{{ m.content }}<|im_end|>\n{% endfor %}"
_ALWAYS = _OPEN + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}" + _CLOSE
_NEVER = _OPEN + _CLOSE
_AFTER_LAST_USER = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + _OPEN
    + "{% if m.reasoning_content and loop.index0 > ns.last %}"
    + "<think>{{ m.reasoning_content }}</think>{% endif %}"
    + _CLOSE
)
_FROM_CONTENT = _OPEN + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"


def _user(text: str = "And?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _thought(content: str = "It is 4.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_TALK = [_user(), _thought(), _user(), _thought(), {"role": "tool", "content": "7"}, _thought(), _user()]


@pytest.mark.parametrize(
    "template, messages, hidden",
    [
        (_ALWAYS, _TALK, set()),
        (_NEVER, _TALK, {1, 3, 5}),
        (_AFTER_LAST_USER, _TALK, {1, 3, 5}),
        (_AFTER_LAST_USER, _TALK[:6], {1}),
        (_AFTER_LAST_USER, _TALK[:2], set()),
    ],
)
def test_reasoning_that_a_template_leaves_out(
    template: str, messages: list[dict[str, Any]], hidden: set[int]
) -> None:
    thinking = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    before = repr(messages)
    assert hidden_reasoning(tokenizer_with(template), messages, thinking) == hidden
    # only the messages that think are examined
    assert hidden_reasoning(tokenizer_with(template), messages, thinking[:1]) == hidden & {1}
    assert repr(messages) == before


@pytest.mark.parametrize("parts", [False, True])
def test_reasoning_in_the_content(parts: bool) -> None:
    text = "<think>two and two</think>It is 4."
    message = _thought([{"type": "text", "text": text}] if parts else text)  # type: ignore[arg-type]
    assert ends_thinking(message)
    assert not ends_thinking(_thought())
    messages = [_user(), message, _user()]
    assert hidden_reasoning(tokenizer_with(_NEVER), messages, [1]) == set()
    assert hidden_reasoning(tokenizer_with(_FROM_CONTENT), messages, [1]) == {1}
