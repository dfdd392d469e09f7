"""The chat fields of a request equal those that vLLM's own route makes of it, where vLLM is installed."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from chat_tokenizer import InvalidMessages
from chat_tokenizer.check import load_for_check
from chat_tokenizer.template import takes_later_system
from tests.support.message_shapes import SHAPES, assistant, user
from tests.support.templates.families import template_files
from tests.unit.formats.messages.test_conversation import CASES as CONVERSATIONS
from tokenproxy.formats.messages.conversation import chat_messages
from tokenproxy.formats.messages.format import chat_options
from tokenproxy.formats.messages.request import read_turn

_TEMPLATES = template_files()
_OTHER = "texts around a call and thinking"
"""They are one text here."""
_HI = [user("Hi")]
_LOOK = {"name": "look", "input_schema": {"properties": {}}}
_BODIES: dict[str, dict[str, Any]] = {
    **{name: {**shape.fields, "messages": shape.messages} for name, shape in SHAPES.items()},
    **{
        f"messages: {name}": {"messages": messages}
        for name, (messages, _) in CONVERSATIONS.items()
        if name != _OTHER
    },
    "all": {
        "messages": [*_HI, {"role": "system", "content": "s"}, assistant("a"), user("b")],
        "system": "p",
        "tools": [_LOOK, {**_LOOK, "name": "g", "strict": False, "description": "d", "defer_loading": True}],
        "tool_choice": {"type": "tool", "name": "g", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 4,
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 1500},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"a": None, "b": [1]},
        "cache_salt": "salt",
        "vllm_xargs": {"a": 1},
    },
}
_READ = [
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "stop", "temperature", "top_p", "top_k"),
    *("stream", "stream_options", "thinking_token_budget", "reasoning_effort", "response_format", "model"),
    *("chat_template_kwargs", "cache_salt", "vllm_xargs", "max_tokens"),
]


def _by_vllm(body: dict[str, Any], merges_system: bool, effort: str) -> dict[str, Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    request = AnthropicMessagesRequest.model_validate(body)
    made: Any = AnthropicServingMessages.to_chat_completion_request(
        request, merge_inline_system=merges_system, disabled_thinking_effort=effort
    )
    if not made.tools:  # the chat route refuses an empty list, and a choice without tools
        made.tools = made.tool_choice = None
    # as the chat route would read what we send
    made = type(made).model_validate(json.loads(made.model_dump_json(exclude_none=True, by_alias=True)))
    return _compared(made)


def _compared(request: Any) -> dict[str, Any]:
    dumped = json.loads(request.model_dump_json(by_alias=True))
    for message in dumped["messages"]:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {name: dumped[name] for name in _READ}


def _by_us(body: dict[str, Any], merges_system: bool, effort: str) -> dict[str, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = read_turn(json.dumps(body).encode())
    fields = json.loads(msgspec.json.encode(chat_options(request, effort)))
    fields["messages"] = chat_messages(request.system, request.messages, merges_system=merges_system)[0]
    return _compared(ChatCompletionRequest.model_validate(fields))


def _has_later_system(body: dict[str, Any]) -> bool:
    roles = [message["role"] for message in body["messages"]]
    return "assistant" in roles and "system" in roles[roles.index("assistant") :]


_CELLS = [
    pytest.param(body, merges_system, id=f"{name}-{'merged' if merges_system else 'in place'}")
    for name, body in _BODIES.items()
    for merges_system in (False, True)
    # vLLM then changes the system prompt, which would change the ids of earlier turns
    if not (merges_system and _has_later_system(body))
]


@pytest.mark.parametrize("body, merges_system", _CELLS)
def test_chat_fields(body: dict[str, Any], merges_system: bool) -> None:
    whole = {"model": "m", "max_tokens": 4000, **body}
    whole = {name: value for name, value in whole.items() if not name.startswith("extra_")}
    for effort in ("none", "low"):
        assert _by_us(whole, merges_system, effort) == _by_vllm(whole, merges_system, effort)


@pytest.mark.parametrize("path", _TEMPLATES.values(), ids=_TEMPLATES)
def test_templates_that_take_later_system_messages(path: Any) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    source = path.read_text()
    merges: bool = AnthropicServingMessages._detect_merge_inline_system(source)
    assert takes_later_system(source) is not merges


@pytest.mark.parametrize("path", _TEMPLATES.values(), ids=_TEMPLATES)
async def test_the_effort_that_disables_thinking(path: Any) -> None:
    """As vLLM's own probe finds it, from the same renderings."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    tokenizer = load_for_check(str(path))

    async def probe(effort: str) -> Any:
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            text = tokenizer.text([{"role": "user", "content": "Hi"}], template_kwargs=kwargs)
        except InvalidMessages:
            return None
        return None, text

    serving: Any = SimpleNamespace(_render_probe_prompt=probe)
    expected = await AnthropicServingMessages._probe_disabled_thinking_effort(serving)
    assert tokenizer.effort_without_thinking == expected
