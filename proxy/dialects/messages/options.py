"""The chat fields of a request besides its conversation."""

from typing import Any

from proxy.dialects.messages.blocks import ToolAddition, ToolRemoval
from proxy.dialects.messages.request import (
    MessagesRequest,
    OutputConfig,
    ThinkingDisabled,
    ThinkingEnabled,
)
from proxy.dialects.messages.tools import chat_tool_choice, chat_tools, tools_in_effect

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "chat_template_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "watermarking",
    "thinking_policy",
)
_STREAM = {"include_usage": True, "continuous_usage_stats": True}


def chat_options(request: MessagesRequest, effort_without_thinking: str) -> dict[str, Any]:
    """The chat fields besides `messages`.

    Args:
        effort_without_thinking: the reasoning effort for disabled thinking; see `TemplateFacts`.

    Raises:
        BadRequest: a tool or the choice between tools is wrong.
    """
    fields: dict[str, Any] = {"model": request.model, "max_tokens": request.max_tokens}
    fields |= {name: getattr(request, name) for name in _SAME_NAME}
    fields["stop"] = request.stop_sequences
    if request.stream:
        fields |= {"stream": True, "stream_options": _STREAM}
    fields |= _output(request.output_config)
    match request.thinking:
        case ThinkingDisabled():
            fields["reasoning_effort"] = effort_without_thinking
        case ThinkingEnabled():
            fields["thinking_token_budget"] = request.thinking.budget_tokens
    fields |= _tools(request)
    return {name: value for name, value in fields.items() if value is not None}


def _output(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None and config.format.schema:
        schema = {"name": "json_schema", "schema": config.format.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tools(request: MessagesRequest) -> dict[str, Any]:
    changes = [
        block
        for message in request.messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolAddition | ToolRemoval)
    ]
    tools = chat_tools(tools_in_effect(request.tools, changes))
    choice = chat_tool_choice(request.tool_choice, bool(tools))
    return {"tools": tools, **choice} if tools else choice
