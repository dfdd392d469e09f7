"""Parses a request in Anthropic's format to a chat turn, converted for the fleet's chat template."""

from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import is_null, raw
from tokenproxy.base.http import Request
from tokenproxy.base.request import ChatRequest
from tokenproxy.fleet.model import FleetModel
from tokenproxy.formats.base import Format, NamedSession, apply_session, chat_request, number, visible_of
from tokenproxy.formats.messages.answer import MessagesTranslation
from tokenproxy.formats.messages.conversation import chat_messages
from tokenproxy.formats.messages.request import (
    DefinedTool,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolAddition,
    ToolChoice,
    ToolRemoval,
    read_request,
    read_turn,
)
from tokenproxy.formats.translated import Translation

_SAME_NAME = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "watermarking"),
    *("thinking_policy", "echo_policy"),
)
_STREAM = {"include_usage": True, "continuous_usage_stats": True}
_OBJECT = msgspec.Raw(b'"object"')


class MessagesFormat(Format):
    """A message of Anthropic's API, whole or as a stream of events; token-exact over turns."""

    path = "/v1/messages"
    summary = "Message of Anthropic's API, token-exact over turns"

    def __init__(self, model: FleetModel | None = None) -> None:
        """`model`: that of the fleet, for whose chat template requests are converted."""
        self._model = model

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        return self._chat_request(request, read_turn(request.body), session)

    def parse_count(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """Parse a request to count the tokens of a prompt. Raises BadRequest."""
        return self._chat_request(request, read_request(request.body), session)

    def translation(self, request: ChatRequest) -> Translation | None:
        """See `Format.translation`."""
        return MessagesTranslation(request.client_model or "")

    def _chat_request(
        self, request: Request, parsed: MessagesRequest, session: NamedSession | None
    ) -> ChatRequest:
        served = self._model
        template = served.tokenizer if served else None  # of an unknown one as vLLM's defaults
        engine = served.capabilities.model if served else None
        limit = engine.max_model_len if engine else None
        options = chat_options(parsed, template.effort_without_thinking if template else "none")
        fields = {
            name: value if isinstance(value, msgspec.Raw) else raw(value) for name, value in options.items()
        }
        merges = template.merges_system if template else True
        messages, signatures = chat_messages(parsed.system, parsed.messages, merges_system=merges)
        fields["messages"] = raw(messages)
        visible = visible_of(fields)
        apply_session(fields, session)
        # clients name the limits of other models. vLLM shortens an answer that does not fit after its prompt,
        # but refuses a limit over the whole context
        for name in ("max_tokens", "max_completion_tokens"):
            if limit is not None and (number(fields, name) or 0) > limit:
                fields[name] = raw(limit)
        return chat_request(request, fields, session, visible, tokens=signatures)


def chat_options(request: MessagesRequest, effort_without_thinking: str) -> dict[str, Any]:
    """The chat fields besides `messages`.

    Args:
        effort_without_thinking: the reasoning effort for disabled thinking: `low` for templates that do not
            know `none`.

    Raises:
        BadRequest: a tool or the choice between tools is wrong.
    """
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME_NAME}
    fields["stop"] = request.stop_sequences
    if request.stream:
        fields |= {"stream": True, "stream_options": _STREAM}
    if (config := request.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None and config.format.schema:
            schema = {"name": "json_schema", "schema": config.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    match request.thinking:
        case ThinkingDisabled():
            fields["reasoning_effort"] = effort_without_thinking
        case ThinkingEnabled():
            fields["thinking_token_budget"] = request.thinking.budget_tokens
    if tools := [_chat_tool(path, tool) for path, tool in _tools_in_effect(request)]:
        fields["tools"] = tools
    fields |= _chat_tool_choice(request.tool_choice, bool(tools))
    return {name: value for name, value in fields.items() if value is not None}


def _tools_in_effect(request: MessagesRequest) -> list[tuple[str, Tool]]:
    """The tools that the model has at the end of the conversation, each with its path in the request.

    Raises:
        BadRequest: a change names a tool that the request does not define.
    """
    declared = [(f"tools[{index}]", tool) for index, tool in enumerate(request.tools or [])]
    contents = (message.content for message in request.messages if not isinstance(message.content, str))
    changes = [
        block for content in contents for block in content if isinstance(block, ToolAddition | ToolRemoval)
    ]
    if not changes:
        return declared
    tools = {tool.name: (path, tool) for path, tool in declared}
    removed: set[str] = set()
    for change in changes:
        if isinstance(change.tool, DefinedTool):
            name = change.tool.definition.name
            tools[name] = ("messages", change.tool.definition)
        else:
            name = change.tool.name
        if name not in tools:
            raise BadRequest(f"messages: the tool {name!r} is not in `tools`", param="messages")
        if isinstance(change, ToolRemoval):
            removed.add(name)
            continue
        removed.discard(name)
        path, tool = tools[name]
        if not isinstance(change.tool, DefinedTool):
            tools[name] = (path, msgspec.structs.replace(tool, defer_loading=None))
    return [defined for name, defined in tools.items() if name not in removed]


_RUN_BY_CLIENTS = ("bash_", "text_editor_", "memory_", "computer_")
"""Beginnings of the types of Anthropic's own tools that the client runs; its servers run the others."""


def _chat_tool(path: str, tool: Tool) -> dict[str, Any]:
    """A tool as chat completions define it. Its schema is an object unless it has another type.

    Raises:
        BadRequest: it has no schema: its type stands for one of Anthropic's own.
    """
    if is_null(tool.input_schema):
        if tool.type in (None, "custom"):
            raise BadRequest(f"{path}.input_schema: required", param=f"{path}.input_schema")
        problem = "run on Anthropic's servers only"
        if (tool.type or "").startswith(_RUN_BY_CLIENTS):
            problem = "have a schema that only Anthropic's models know"
        raise BadRequest(
            f"{path}.type: tools of type {tool.type} {problem}: define a tool with an `input_schema`",
            param=f"{path}.type",
        )
    try:
        schema = msgspec.json.decode(tool.input_schema, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path}.input_schema: must be an object", param=f"{path}.input_schema") from error
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    if "type" not in schema:
        function["parameters"] = raw({**schema, "type": _OBJECT})
    more = {"strict": tool.strict, "defer_loading": tool.defer_loading}
    function |= {name: value for name, value in more.items() if value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice | None, has_tools: bool) -> dict[str, Any]:
    """The chat fields for a choice between tools.

    Raises:
        BadRequest: the choice is one tool, and has no name.
    """
    if choice is None:
        return {"tool_choice": "auto"} if has_tools else {}
    parallel = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        if not choice.name:
            raise BadRequest("tool_choice.name: required for the type `tool`", param="tool_choice.name")
        return {**parallel, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.type == "any":
        return {**parallel, "tool_choice": "required"}
    # without tools there is nothing to choose, and a chat completion may not have a choice
    return {**parallel, "tool_choice": choice.type} if has_tools else {}
