"""Conversations and template arguments that the source of a template suggests: more shapes for the matrix."""

from collections.abc import Iterable
from typing import Any

import jinja2.nodes

from tests.support.templates.corpus import ChatTemplate
from tests.support.templates.shapes import (
    ANSWERED,
    FURTHER_SHAPES,
    NEXT,
    SHAPES,
    Message,
    Shape,
    assistant,
    user,
)

_ROLES = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "role", "name"),
        *("text", "image", "audio", "video", "string", "array", "object", "type", "content", "id"),
        *("tool_calls", "function_call", "arguments", "parameters", "description"),
    }
)
"""Names of roles, fields and types."""
_SEARCHES = ("startswith", "endswith", "find", "split", "replace", "count")
"""Methods of texts that take a text to look for."""
_MAX_CONSTANTS = 6
_MAX_NUMBER = 40
_MAX_VARIABLES = 8
_FURTHER_VALUES: dict[str, tuple[object, ...]] = {
    "reasoning_effort": ("low", "high"),
    "reasoning_strength": ("low",),
    "builtin_tools": (["python"],),
    "date_string": ("1 Jan 2025",),
}
"""Values to try for a template argument next to True and False."""
_NO_SWITCH = frozenset(
    {
        *("messages", "tools", "documents", "bos_token", "eos_token", "pad_token", "unk_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"),
        *("add_generation_prompt", "chat_template", "truncation", "padding", "tokenize"),
    }
)
"""Variables that every renderer sets, and arguments of `apply_chat_template` itself."""


def shapes_of(template: ChatTemplate) -> list[Shape]:
    """The conversations to try with a template."""
    shapes = [*SHAPES, *FURTHER_SHAPES]
    for constant in _constants(template):
        system = {"role": "system", "content": f"{constant} Be brief. {constant}"}
        shapes.append(Shape(f"system says {constant!r}", [system, *ANSWERED], [NEXT]))
    number = _largest_number(template)
    if number > 3:
        chat: list[Message] = []
        for index in range(number // 2 + 1):
            chat += [user(f"Question {index}?"), assistant(f"Answer {index}.")]
        shapes.append(Shape(f"{len(chat)} messages", [*chat, *ANSWERED], [NEXT]))
    return shapes


def variables_of(template: ChatTemplate) -> dict[str, dict[str, Any]]:
    """The template arguments to try with a template, by name."""
    switches = sorted(template.variables - _NO_SWITCH)[:_MAX_VARIABLES]
    tried: dict[str, dict[str, Any]] = {"none": {}}
    if "add_generation_prompt" in template.variables:
        tried["add_generation_prompt=False"] = {"add_generation_prompt": False}
    for name in switches:
        for value in (True, False, *_FURTHER_VALUES.get(name, ())):
            tried[f"{name}={value}"] = {name: value}
    return tried


def _constants(template: ChatTemplate) -> list[str]:
    """Texts that the template looks for, in a comparison or a call, without the names of roles and fields."""
    if template.tree is None:
        return []
    found: set[str] = set()
    for comparison in template.tree.find_all(jinja2.nodes.Compare):
        operands = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        found |= _texts(operands)
    for method in template.tree.find_all(jinja2.nodes.Call):
        if isinstance(method.node, jinja2.nodes.Getattr) and method.node.attr in _SEARCHES:
            found |= _texts(method.args)
    texts = sorted(text for text in found if len(text.strip()) > 1 and text not in _ROLES)
    # what looks like a command first
    return sorted(texts, key=lambda text: not text.startswith("/"))[:_MAX_CONSTANTS]


def _texts(nodes: Iterable[jinja2.nodes.Node]) -> set[str]:
    """The values of those nodes that are string constants."""
    constants = (node for node in nodes if isinstance(node, jinja2.nodes.Const))
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def _largest_number(template: ChatTemplate) -> int:
    if template.tree is None:
        return 0
    numbers = [node.value for node in template.tree.find_all(jinja2.nodes.Const) if type(node.value) is int]
    return max((number for number in numbers if number <= _MAX_NUMBER), default=0)
