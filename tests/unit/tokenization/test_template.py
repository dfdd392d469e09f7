"""What a chat template is given, and what becomes of the errors that it raises."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, InvalidMessages, TemplateUnsupported
from tests.support.tiny_model import TinyModel

Load = Callable[..., ChatTokenizer]
_USER = {"role": "user", "content": "Hi"}
_TURN = {"role": "assistant", "content": "Ho"}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
_DEVELOPER = {"role": "developer", "content": "Be brief."}
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)


@pytest.fixture
def load(tiny_model: TinyModel) -> Load:
    return lambda template, **options: ChatTokenizer.load(tiny_model.folder, template, **options)


@pytest.mark.parametrize(
    "template, error",
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.append(1) }}", "refuses the messages: "),
        ("{{ raise_exception('only two turns') }}", "refuses the messages: only two turns"),
        ("\n{{ messages | no_such_filter }}", "cannot be compiled: line 2: No filter named"),
    ],
)
def test_errors_of_a_template_are_invalid_messages(load: Load, template: str, error: str) -> None:
    tokenizer = load(template)
    with pytest.raises(InvalidMessages, match=error):
        tokenizer.render([_USER])
    with pytest.raises(InvalidMessages):
        tokenizer.append([1], [_USER], history=[_USER, {"role": "assistant", "content": "Hi"}])


def test_fingerprint_covers_format_and_defaults(load: Load) -> None:
    plain = load(_CHATML)
    others = [
        load(_CHATML, content_format="openai"),
        load(_CHATML, default_template_kwargs={"a": 1}),
        plain.with_content_format("string"),
        load(_CHATML + " "),
    ]
    assert len({tokenizer.fingerprint for tokenizer in [plain, *others]}) == 5
    assert plain.with_content_format(None).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "kwargs, expected",
    [({"effort": None, "other": "auto"}, "default-"), ({"effort": "auto", "other": 0}, "default-0")],
)
def test_defaults_apply_where_a_request_sets_nothing(
    load: Load, kwargs: dict[str, Any], expected: str
) -> None:
    """As in vLLM, null and "auto" are no values."""
    tokenizer = load("{{ effort }}-{{ other }}", default_template_kwargs={"effort": "default"})
    assert tokenizer.text([_USER], template_kwargs=kwargs) == expected


def test_template_is_chosen_by_tools_and_by_name(load: Load) -> None:
    tokenizer = load(_CHATML)
    tokenizer._tokenizer.chat_template = {"default": "d", "tool_use": "t", "rag": "r"}
    assert tokenizer.text([_USER]) == "d"
    assert tokenizer.text([_USER], tools=_TOOLS) == "t"
    assert tokenizer.text([_USER], tools=_TOOLS, template_kwargs={"chat_template": "rag"}) == "r"
    tokenizer._tokenizer.chat_template = {"rag": "r"}
    with pytest.raises(InvalidMessages, match="no chat template"):
        tokenizer.text([_USER])


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_template_of_the_processor_is_loaded(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    shutil.copytree(tiny_model.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps({"chat_template": "of the processor"}))
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.text([_USER]) == "of the processor"
    assert "<|im_start|>user" in tokenizer.text([_USER], tools=_TOOLS)
    assert ChatTokenizer.load(tmp_path, "given").text([_USER]) == "given"


@pytest.mark.parametrize("history", [None, [_DEVELOPER, _USER, _TURN]])
def test_developer_message_that_the_engine_merges_is_refused(load: Load, history: Any) -> None:
    tokenizer = load(_CHATML)
    assert "system\nBe brief.<|im_end|>\n<|im_start|>user" in tokenizer.text([_USER, _TURN, _DEVELOPER])
    with pytest.raises(TemplateUnsupported, match="does not know the role `developer`"):
        tokenizer.append([1], [_DEVELOPER, _USER], history=history)


def test_system_message_is_refused_where_a_developer_message_makes_the_engine_merge_it(load: Load) -> None:
    tokenizer, system = load(_CHATML), {"role": "system", "content": "Be kind."}
    with pytest.raises(TemplateUnsupported, match="send it as a user message"):
        tokenizer.append([1], [system, _USER], history=[_USER, _DEVELOPER, _TURN])
    appended = tokenizer.append([1], [system, _USER], history=[_USER, _TURN])
    assert "system\nBe kind." in tokenizer.decode(appended.suffix_ids)


def test_developer_message_is_appended_where_the_template_knows_it(load: Load) -> None:
    appended = load(_CHATML + '{# "developer" #}').append([1], [_DEVELOPER, _USER])
    assert "developer\nBe brief." in load(_CHATML).decode(appended.suffix_ids)
