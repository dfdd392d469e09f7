"""What the demo prints, its tools, and its chat template."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenproxy.demo.checkpoint import TEMPLATE_FILE
from tokenproxy.demo.conversation import Conversation, Turn
from tokenproxy.demo.main import render, summary
from tokenproxy.demo.tools import TOOLS, call_tool


def _turn(number: int, before: int = 0, reused: int = 0, prompt: int = 100, cached: int | None = 64) -> Turn:
    return Turn(number, "answer", prompt, 48, before, reused, cached, 1.0)


_EXACT = Conversation("token route", (_turn(1), _turn(2, 148, 148, 170)))
_DRIFTED = Conversation("stock chat route", (_turn(1), _turn(2, 148, 103, 160, None)))
_SHORT = Conversation("token route", (_turn(1),))


def _rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line[:4].strip().isdigit()]


def test_the_table() -> None:
    text = render(_EXACT, _DRIFTED)
    assert _rows(text) == [
        "1 answer | 100 0 100 - 64 48 1.0 | 100 0 100 - 64 48 1.0",
        "2 answer | 170 148 22 yes 64 48 1.0 | 160 103 57 NO ? 48 1.0",
    ]
    assert text.splitlines()[-2:] == [
        "token route: 1 of 1 follow-up turns exact (100%)",
        "stock chat route: 0 of 1 follow-up turns exact (0%), 1 drifted",
    ]
    assert summary(_SHORT) == "token route: no follow-up turns"
    assert _rows(render(_EXACT, _SHORT))[1].count("|") == 2  # turns of the shorter one are blank
    assert _rows(render(_SHORT, _EXACT))[1].split("|")[1].strip() == ""


def test_invalid_calls_return_an_error_result() -> None:
    assert call_tool("calculator", '{"a": 18, "operator": "-", "b": 7}') == '{"value": 11}'
    for wrong in ('{"a": 18, "operator": "*"', '{"a": "x", "operator": "-", "b": "y"}'):
        assert "error" in json.loads(call_tool("calculator", wrong))
    assert "unknown tool" in json.loads(call_tool("search", "{}"))["error"]


_USER = {"role": "user", "content": "hi"}
_ARGUMENTS = {"a": 1, "operator": "+", "b": 2}
_CALL_TEXT = f'<tool_call>\n{{"name": "calculator", "arguments": {json.dumps(_ARGUMENTS)}}}\n</tool_call>'


def _rendered(*messages: dict[str, Any], **options: Any) -> str:
    """The text as transformers renders it."""
    template = TEMPLATE_FILE.read_text()
    [text], _ = render_jinja_template(conversations=[list(messages)], chat_template=template, **options)
    return str(text)


def test_the_template_without_and_with_tools() -> None:
    assert _rendered(_USER, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = _rendered({"role": "system", "content": "Be brief."}, _USER, tools=list(TOOLS))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert text.count("<|im_start|>system") == 1
    assert text.index("<tools>\n{") < text.index('"get_weather"') < text.index('"calculator"')


@pytest.mark.parametrize("content, before", [(None, ""), ("Well.", "Well.\n")])
@pytest.mark.parametrize("arguments", [_ARGUMENTS, json.dumps(_ARGUMENTS)], ids=["object", "string"])
def test_the_template_renders_calls_and_results(content: str | None, before: str, arguments: Any) -> None:
    calls = [{"function": {"name": "calculator", "arguments": arguments}}] * 2
    assistant = {"role": "assistant", "content": content, "tool_calls": calls}
    results = [{"role": "tool", "content": "3", "tool_call_id": name} for name in "ab"]
    assert _rendered(_USER, assistant, *results).endswith(
        f"<|im_start|>assistant\n{before}{_CALL_TEXT}\n{_CALL_TEXT}<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
    )
