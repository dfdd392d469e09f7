"""Which reasoning of earlier turns a template leaves out."""

from typing import Any

import pytest

from chat_tokenizer.thinking import ends_thinking, hidden_reasoning
from tests.support.tiny_templates import HEADER, NEVER_THINKS, THINKS, THINKS_AFTER_LAST_USER, chatml
from tests.unit.tokenization.in_memory import tokenizer_with

_FROM_CONTENT = chatml(HEADER + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n")
_USER, _THOUGHT = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "It is 4."}
_TALK = [_USER, _THOUGHT, _USER, _THOUGHT, {"role": "tool", "content": "7"}, _THOUGHT, _USER]


@pytest.mark.parametrize(
    "template, messages, hidden",
    [
        (THINKS, _TALK, set()),
        (NEVER_THINKS, _TALK, {1, 3, 5}),
        (THINKS_AFTER_LAST_USER, _TALK, {1, 3, 5}),
        (THINKS_AFTER_LAST_USER, _TALK[:6], {1}),
    ],
)
def test_reasoning_that_a_template_leaves_out(
    template: str, messages: list[dict[str, Any]], hidden: set[int]
) -> None:
    thinking = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert hidden_reasoning(tokenizer_with(template), messages, thinking) == hidden
    # only the messages that think are examined
    assert hidden_reasoning(tokenizer_with(template), messages, thinking[:1]) == hidden & {1}


@pytest.mark.parametrize("parts", [False, True])
def test_reasoning_in_the_content(parts: bool) -> None:
    text = "<think>two and two</think>It is 4."
    message: dict[str, Any] = {**_THOUGHT, "content": [{"type": "text", "text": text}] if parts else text}
    assert ends_thinking(message)
    assert not ends_thinking(_THOUGHT)
    messages: list[Any] = [_USER, message, _USER]
    assert hidden_reasoning(tokenizer_with(NEVER_THINKS), messages, [1]) == set()
    assert hidden_reasoning(tokenizer_with(_FROM_CONTENT), messages, [1]) == {1}
