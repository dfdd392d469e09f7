"""The chat template, rendered as transformers renders it."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from proxy.demo.checkpoint import TEMPLATE_FILE
from proxy.demo.tools import TOOLS

USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "calculator", "arguments": {"a": 1, "operator": "+", "b": 2}}}
CALL_TEXT = (
    '<tool_call>\n{"name": "calculator", "arguments": {"a": 1, "operator": "+", "b": 2}}\n</tool_call>'
)


def render(messages, tools=None, add_generation_prompt=False):
    [text], _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=TEMPLATE_FILE.read_text(),
        add_generation_prompt=add_generation_prompt,
    )
    return text


def test_chat_without_tools_is_chatml_with_the_default_system_prompt():
    assert render([USER], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_given_system_prompt_replaces_the_default_and_precedes_tools():
    text = render([{"role": "system", "content": "Be brief."}, USER], tools=list(TOOLS))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert text.count("<|im_start|>system") == 1
    assert text.index("<tools>\n{") < text.index('"get_weather"') < text.index('"calculator"')


@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_and_results_are_rendered(content):
    text = render(
        [
            USER,
            {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "a"},
            {"role": "tool", "content": "3", "tool_call_id": "b"},
        ]
    )
    assert text.endswith(
        f"<|im_start|>assistant\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
    )


def test_text_before_a_tool_call_and_string_arguments_are_rendered():
    call = {"function": {"name": "calculator", "arguments": '{"a": 1, "operator": "+", "b": 2}'}}
    text = render([USER, {"role": "assistant", "content": "Well.", "tool_calls": [call]}])
    assert text.endswith(f"<|im_start|>assistant\nWell.\n{CALL_TEXT}<|im_end|>\n")


def test_empty_tool_calls_render_as_text_only():
    text = render([USER, {"role": "assistant", "content": "Well.", "tool_calls": []}])
    assert text.endswith("<|im_start|>assistant\nWell.<|im_end|>\n")
