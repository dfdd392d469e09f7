"""Tools and the choice between them, and their chat fields."""

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.dialects.messages.blocks import DefinedTool, ToolAddition, ToolRemoval
from proxy.dialects.messages.definitions import Tool, ToolChoice
from proxy.errors import BadRequest
from proxy.fields import is_null

_OBJECT = msgspec.Raw(b'"object"')


def tools_in_effect(
    tools: Sequence[Tool] | None, changes: Sequence[ToolAddition | ToolRemoval]
) -> list[tuple[str, Tool]]:
    """The tools that the model has at the end of the conversation, each with its path in the request.

    Raises:
        BadRequest: a change names a tool that the request does not define.
    """
    declared = [(f"tools[{index}]", tool) for index, tool in enumerate(tools or [])]
    if not changes:
        return declared
    by_name = {tool.name: (path, tool) for path, tool in declared}
    removed: set[str] = set()
    for change in changes:
        name = _apply(change, by_name)
        if isinstance(change, ToolRemoval):
            removed.add(name)
        else:
            removed.discard(name)
    return [defined for name, defined in by_name.items() if name not in removed]


def _apply(change: ToolAddition | ToolRemoval, tools: dict[str, tuple[str, Tool]]) -> str:
    """Define the tool of a change, or no longer defer it; returns its name. Raises BadRequest."""
    if isinstance(change.tool, DefinedTool):
        definition = change.tool.definition
        tools[definition.name] = ("messages", definition)
        return definition.name
    name = change.tool.name
    if name not in tools:
        raise BadRequest(f"messages: the tool {name!r} is not in `tools`", param="messages")
    if isinstance(change, ToolAddition):
        path, tool = tools[name]
        tools[name] = (path, msgspec.structs.replace(tool, defer_loading=None))
    return name


def chat_tools(tools: Sequence[tuple[str, Tool]]) -> list[dict[str, Any]]:
    """The tools as chat completions define them.

    Raises:
        BadRequest: a tool has no schema: those that Anthropic's servers run cannot run here.
    """
    return [{"type": "function", "function": _function(path, tool)} for path, tool in tools]


def _function(path: str, tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _schema(path, tool),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.defer_loading is not None:
        function["defer_loading"] = tool.defer_loading
    return function


def _schema(path: str, tool: Tool) -> msgspec.Raw:
    """The schema of the arguments, an object unless it has another type. Raises BadRequest."""
    if is_null(tool.input_schema):
        if tool.type in (None, "custom"):
            raise BadRequest(f"{path}.input_schema: required", param=f"{path}.input_schema")
        raise BadRequest(
            f"{path}.type: tools of type {tool.type} run on Anthropic's servers only: define a tool with an "
            "`input_schema`",
            param=f"{path}.type",
        )
    try:
        schema = msgspec.json.decode(tool.input_schema, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path}.input_schema: must be an object", param=f"{path}.input_schema") from error
    if "type" in schema:
        return tool.input_schema
    return msgspec.Raw(msgspec.json.encode({**schema, "type": _OBJECT}))


def chat_tool_choice(choice: ToolChoice | None, has_tools: bool) -> dict[str, Any]:
    """The chat fields for a choice between tools.

    Raises:
        BadRequest: the choice is one tool, and has no name.
    """
    if choice is None:
        return {"tool_choice": "auto"} if has_tools else {}
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    match choice.type:
        case "tool":
            if not choice.name:
                raise BadRequest("tool_choice.name: required for the type `tool`", param="tool_choice.name")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case "any":
            fields["tool_choice"] = "required"
        case _ if has_tools:
            fields["tool_choice"] = choice.type
        case _:
            return {}  # without tools there is nothing to choose, and a chat completion may not have a choice
    return fields
