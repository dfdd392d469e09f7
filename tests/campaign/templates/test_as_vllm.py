"""Text rendered here equals text that vLLM's own code renders.

Each conversation takes vLLM's way from the JSON of a request to the text of the prompt: validation of the
request, conversion of its messages, rendering. No engine is started.
"""

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer, InvalidMessages
from chat_tokenizer.check import load_for_check
from chat_tokenizer.template import detect_content_format
from tests.support.templates.corpus import FOLDER, corpus, sample
from tests.support.templates.families import template_files

_TEMPLATES = {**template_files(), **{each.name: FOLDER / f"{each.name}.jinja" for each in sample()}}
_LISTS_PER_TEMPLATE = 12
_PRINT_ALL = "{{ messages | tojson }} {{ tools | tojson }} {{ enable_thinking }} {{ reasoning_effort }}"
_PARTS = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
_CONFIG = SimpleNamespace(
    **dict.fromkeys(("multimodal_config", "tokenizer_revision", "revision", "code_revision")),
    **dict.fromkeys(("enable_prompt_embeds", "trust_remote_code"), False),
    **{"model": "", "tokenizer": "", "hf_config": SimpleNamespace(model_type="llama")},
)
_TOOL = {
    "function": {"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}, "name": "f", "x": 1},
    "type": "function",
}
_ARGUMENTS = ("", "{}", '{"b": "é", "a": [1, null]}', "[]", "5", "null", "{not json", '"text"')
_TEXTS = ("", "a", " b\n", "x-anthropic-billing-header: cch=1\nrest", "<think>t</think>u", "四")
_REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": [_TOOL]},
    {"tools": [_TOOL, {"function": {"name": "g", "strict": True, "description": "d"}}]},
    {"chat_template_kwargs": {"enable_thinking": None, "reasoning_effort": "auto"}},
    {"chat_template_kwargs": {"enable_thinking": False}, "tools": [_TOOL]},
    {"add_generation_prompt": False},
)


class _Refused(Exception):
    """vLLM refuses the request before it renders the template."""


def _vllm_text(tokenizer: Any, body: dict[str, Any]) -> str | None:
    """The text that vLLM renders; None if the template refuses the messages. Raises _Refused."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import hf, merge_kwargs
    from vllm.renderers.chat_utils import parse_chat_messages

    config: Any = _CONFIG
    try:
        request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        defaults = merge_kwargs(None, {"tools": tools, "tokenize": False})
        params = request.build_chat_params(tokenizer.chat_template, "auto").with_defaults(defaults)
        content_format = hf.resolve_chat_template_content_format(
            params.chat_template, tools, "auto", tokenizer, model_config=config
        )
        conversation, _, _ = parse_chat_messages(request.messages, config, content_format)
    except (ValueError, TypeError) as error:
        raise _Refused from error
    kwargs = params.get_apply_chat_template_kwargs()
    try:
        text: str = hf.safe_apply_chat_template(config, tokenizer, conversation, **kwargs)
    except VLLMValidationError:
        return None
    return text


def _own_text(subject: ChatTokenizer, body: dict[str, Any]) -> str | None:
    try:
        return subject.text(
            body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            template_kwargs=body.get("chat_template_kwargs"),
        )
    except InvalidMessages:
        return None


def _content(source: random.Random) -> Any:
    if source.random() < 0.6:
        return source.choice([*_TEXTS, *_TEXTS, None])
    parts = [{"type": "text", "text": text} for text in _TEXTS]
    parts += [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "t"}]
    cached: Any = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    return source.choices([*parts, cached], k=source.randint(0, 3))


def _call(source: random.Random, number: int) -> dict[str, Any]:
    function = {"name": source.choice("fg"), "arguments": source.choice(_ARGUMENTS)}
    extra = source.choice([{}, {"index": number}])
    return {"type": "function", "id": f"call{number:05}", "function": function, **extra}


def _message(source: random.Random, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": _content(source)}
    if role == "assistant":
        if source.random() < 0.5:
            calls = [_call(source, number) for number in range(source.randint(0, 2))]
            message["tool_calls"] = source.choice([calls, calls, None])
        if source.random() < 0.4:
            name = source.choice(["reasoning", "reasoning_content"])
            message[name] = source.choice(["why", "", None])
    elif role == "tool":
        message |= {"tool_call_id": "call00000", "content": message["content"] or ""}
    if source.random() < 0.2:
        message["name"] = "f"
    if role == "developer" and source.random() < 0.3:
        message["tools"] = [_TOOL]
    return message


def _body(source: random.Random) -> dict[str, Any]:
    """A request: half of the conversations have the usual order of roles, which most templates want."""
    usual = [source.choice(["system", "developer"]), "user", "assistant", "tool", "assistant", "user"]
    roles = usual[source.randint(0, 1) : source.randint(2, 6)]
    if source.random() < 0.5:
        roles = source.choices(["system", "developer", "user", "assistant", "tool"], k=source.randint(1, 6))
    messages = [_message(source, role) for role in roles]
    return {"messages": messages, **source.choice(_REQUESTS)}


def test_content_format_of_every_template() -> None:
    from vllm.renderers import hf

    for template in corpus():
        expected = hf._detect_content_format(template.text, default="string")
        assert detect_content_format(template.text) == expected, template.name


@pytest.mark.parametrize("name", _TEMPLATES)
def test_rendered_text(name: str) -> None:
    _compare(load_for_check(str(_TEMPLATES[name])), random.Random(name), _LISTS_PER_TEMPLATE)


@pytest.mark.parametrize("more", ["", _PARTS, "{# 'developer' #}", _PARTS + "{# 'developer' #}"])
def test_everything_that_reaches_a_template(tmp_path: Path, more: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(_PRINT_ALL + more)
    _compare(load_for_check(str(file)), random.Random(more), 150)


def _compare(subject: ChatTokenizer, source: random.Random, count: int) -> None:
    """Compare the texts of `count` conversations that vLLM does not refuse before it renders them."""
    compared = 0
    while compared < count:
        body = _body(source)
        try:
            expected = _vllm_text(subject._tokenizer, body)
        except _Refused:
            continue
        assert _own_text(subject, body) == expected, json.dumps(body, ensure_ascii=False)
        compared += 1
