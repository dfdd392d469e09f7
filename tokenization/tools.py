"""Converts tool definitions from the form that OpenAI clients send to the form that chat templates take.

vLLM parses the tools of a request and writes them anew before it renders, so the fields of each tool have its
order, and a missing description is null. Templates print tools as JSON, so both change the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def tools_for_template(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """Convert tools; None if there are none.

    Example: `{"function": {"name": "f", "x": 1}, "y": 2}` becomes
    `{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}`.
    A tool that is not a function with a name is not changed: vLLM refuses it.
    """
    return [_convert(tool) for tool in tools] if tools else None


def _convert(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    deferred = tool.get("defer_loading")
    definition = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    optional = {
        "strict": function.get("strict"),
        "defer_loading": deferred if function.get("defer_loading") is None else function["defer_loading"],
    }
    definition.update((key, value) for key, value in optional.items() if value is not None)
    converted = {"type": "function", "function": definition}
    return converted if deferred is None else {**converted, "defer_loading": deferred}
