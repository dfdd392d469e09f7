"""What the source of a chat template compares with and reads: the values on which a rendering may depend.

Found in the template's syntax tree. A string that is only printed, such as `<|im_start|>`, decides nothing
and is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenization.variables import variables_of_request

_DECIDING = (
    nodes.Compare,
    nodes.Test,
    nodes.Call,
    nodes.Filter,
    nodes.Getitem,
    nodes.Dict,
    nodes.Assign,
    nodes.Mod,
    nodes.Keyword,
)
"""Nodes under which a constant may decide what is printed."""
_PRINTING_CALLS = frozenset({"raise_exception", "strftime_now"})
_NOT_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "additional_special_tokens",
    }
)
"""Variables that the renderer sets itself."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The constants and variables of a template."""

    strings: tuple[str, ...]
    """Text that the template compares with or looks for."""
    numbers: tuple[int, ...]
    """Whole numbers that the template compares with or divides by; without their signs."""
    kwargs: tuple[str, ...]
    """Variables that a request may set."""


class _Generation(Extension):
    """Reads `{% generation %}` blocks, in which templates for training wrap assistant text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        # what such a block sets is unset after it
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def read_syntax(source: str) -> Syntax:
    """Read the source of a template. Empty for one that cannot be parsed, and so cannot be rendered."""
    # the settings of transformers, which renders the template
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    try:
        tree = environment.parse(source)
        kwargs = variables_of_request(tree) - _NOT_KWARGS
    except (jinja2.TemplateError, RecursionError):
        return Syntax((), (), ())
    strings: dict[str, None] = {}
    numbers: set[int] = set()
    for value in _deciding_values(tree):
        if isinstance(value, str):
            strings[value] = None
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers.add(abs(value))
    return Syntax(tuple(strings), tuple(sorted(numbers)), tuple(sorted(kwargs)))


def _deciding_values(tree: nodes.Template) -> Iterator[object]:
    names = {id(node.arg) for node in tree.find_all(nodes.Getitem)}
    for node in tree.find_all(_DECIDING):
        called = node.node if isinstance(node, nodes.Call) else None
        if isinstance(called, nodes.Name) and called.name in _PRINTING_CALLS:
            continue
        for constant in node.find_all(nodes.Const):
            # `message['role']` reads a field; which fields a message has is not up to its text
            if not (isinstance(constant.value, str) and id(constant) in names):
                yield constant.value
