"""Tools of a request as the tools of a chat completion, and names of calls back again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects.responses.content import Item, kind_of, text_field
from proxy.errors import BadRequest
from proxy.turn.engine_json import encodable

_LEFT_OUT = (
    "web_search",
    "web_search_preview",
    "image_generation",
    "tool_search",
    "file_search",
    "code_interpreter",
)
"""Types, or beginnings of dated types, of tools that a provider runs by itself and a model can do without.
Codex sends some of them with every request."""
_INPUT = "input"
"""The one parameter of a custom tool. Names and texts are vLLM's."""
_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request."""

    functions: list[Item] = field(default_factory=list)
    """As a chat completion has them."""
    custom: frozenset[str] = frozenset()
    """Names of the functions that stand for custom tools."""
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the functions of namespaces, by the names that the model sees."""

    @property
    def names(self) -> set[str]:
        """All names that the model sees."""
        return {function["function"]["name"] for function in self.functions}


def flat_name(namespace: str, name: str) -> str:
    """The name that the model sees of a function in a namespace."""
    return f"{namespace}__{name}"


def wrapped_input(text: str) -> str:
    """The arguments of the function call that stands for a call of a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def unwrapped_input(arguments: str) -> str:
    """The input of a custom tool's call; the arguments themselves if the model wrote others."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return encodable(text) if isinstance(text, str) else arguments


def tools_of(tools: list[Any]) -> Tools:
    """The tools of a request.

    Raises:
        BadRequest: a tool cannot be read, or is of a type without which its client cannot work as it expects.
    """
    functions: list[Item] = []
    custom: set[str] = set()
    spaces: dict[str, tuple[str, str]] = {}
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        kind = kind_of(tool, at)
        if kind == "function":
            functions.append(_function(tool, text_field(tool, "name", at)))
        elif kind == "custom":
            functions.append(_custom(tool, at))
            custom.add(tool["name"])
        elif kind == "namespace":
            space = text_field(tool, "name", at)
            for place, inner in enumerate(_list(tool, "tools", at)):
                inside = f"{at}.tools[{place}]"
                if kind_of(inner, inside) == "function":
                    name = text_field(inner, "name", inside)
                    spaces[flat_name(space, name)] = (space, name)
                    functions.append(_function(inner, flat_name(space, name)))
        elif not kind.startswith(_LEFT_OUT):
            raise BadRequest(
                f"`{at}.type` is `{kind}`, which this server does not run: it takes `function`, `custom` "
                "and `namespace`",
                param=f"{at}.type",
            )
    return Tools(functions, frozenset(custom), spaces)


def choice_of(choice: object, tools: Tools) -> object:
    """`tool_choice` of a chat completion; None to leave it out.

    Raises:
        BadRequest: it cannot be read, or names a tool that the request does not have.
    """
    if choice is None or (not tools.functions and choice in ("auto", "none")):
        return None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise BadRequest("`tool_choice` must be auto, none, required or an object", param="tool_choice")
        if not tools.functions:
            raise BadRequest(f"`tool_choice` is {choice}, and there are no `tools`", param="tool_choice")
        return choice
    kind = kind_of(choice, "tool_choice")
    assert isinstance(choice, dict)
    if kind not in ("function", "custom"):
        raise BadRequest(
            f"`tool_choice.type` is `{kind}`: this server takes `function` and `custom`",
            param="tool_choice.type",
        )
    name = text_field(choice, "name", "tool_choice")
    matching = [flat for flat, (_, local) in tools.spaces.items() if local == name]
    if name not in tools.names and len(matching) != 1:
        raise BadRequest(f"`tool_choice` names `{name}`, which is not in `tools`", param="tool_choice")
    return {"type": "function", "function": {"name": name if name in tools.names else matching[0]}}


def _function(tool: Item, name: str) -> Item:
    shown = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **shown}}


def _custom(tool: Item, at: str) -> Item:
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        raise BadRequest(
            f"`{at}.format` is a grammar, which no engine follows here: give the tool the format `text`, or "
            "make it a function",
            param=f"{at}.format",
        )
    name = text_field(tool, "name", at)
    return _function({**tool, "parameters": _CUSTOM_PARAMETERS, "strict": None}, name)


def _list(tool: Item, name: str, at: str) -> list[Any]:
    value = tool.get(name)
    if not isinstance(value, list):
        raise BadRequest(f"`{at}.{name}` must be a list", param=f"{at}.{name}")
    return value
