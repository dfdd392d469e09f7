"""Detects from the source of a chat template which form of content it takes.

"openai" is a list of parts, for templates that loop over a message's content; "string" is one text. vLLM
detects the format in the same way (`_detect_content_format` in vllm/renderers/hf.py), by names alone: it
follows no scopes. So the answer is not what suits the template best, but what the engine passes to it.
"""

from collections.abc import Collection, Iterator
from typing import Literal, TypeGuard

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ContentFormat = Literal["string", "openai"]


def detect_content_format(source: str) -> ContentFormat:
    """The format that vLLM detects for a template; "string" if the template has a syntax error.

    Args:
        source: Jinja source of the template.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_GenerationTag, loopcontrols])
    try:
        tree = environment.parse(source)
        return "openai" if _loops_over_content(tree) else "string"
    except (TemplateError, RecursionError, _Unfollowed):
        return "string"


class _GenerationTag(Extension):
    """Parses the block `{% generation %}`, an extension of transformers: its body stands for it."""

    tags = {"generation"}  # noqa: RUF012 (an attribute that Jinja declares as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Unfollowed(Exception):
    """The messages are bound to something else than a name, such as `ns.rest`: vLLM gives up here."""


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the first loop over content binds a name.

    Loops over content are `for part in message.content`, `for part in content` outside of macros, and loops
    in macros over a parameter that some call passes a message's content for.
    """
    messages = _message_names(tree)
    parameters = _content_parameters(tree, messages)
    in_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        over_content = _is_content_of(loop.iter, messages)
        if not over_content and isinstance(loop.iter, nodes.Name):
            name = loop.iter.name
            over_content = name in parameters.get(id(loop), ()) or (
                name == "content" and id(loop) not in in_macros
            )
        if over_content:
            return bool(_bound_name(loop.target))
    return False


def _message_names(tree: nodes.Template) -> set[str]:
    """The names that loops over `messages`, or over a variable that holds some of them, give to a message."""
    lists, pending = {"messages"}, ["messages"]
    while pending:
        name = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            if _is_name(_unwrapped(assignment.node), [name]):
                target = _bound_name(assignment.target)
                if target not in lists:
                    lists.add(target)
                    pending.append(target)
    loops = (loop for loop in tree.find_all(nodes.For) if _is_name(_unwrapped(loop.iter), lists))
    return {_bound_name(loop.target) for loop in loops}


def _content_parameters(tree: nodes.Template, messages: Collection[str]) -> dict[int, set[str]]:
    """For each loop in a macro, by the id of its node: parameters of the macro that receive content."""
    parameters: dict[int, set[str]] = {}
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        names = [parameter.name for parameter in macro.args]
        receiving = {
            name
            for call in calls
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, value in _arguments(call, names)
            if _is_content_of(value, messages)
        }
        if receiving:
            parameters.update((id(loop), receiving) for loop in macro.find_all(nodes.For))
    return parameters


def _arguments(call: nodes.Call, names: list[str]) -> Iterator[tuple[str, nodes.Expr]]:
    """The arguments of a call that are passed for the parameters `names`."""
    yield from zip(names, call.args, strict=False)
    yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)


def _bound_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unfollowed
    return target.name


def _is_content_of(node: nodes.Node, messages: Collection[str]) -> bool:
    """Whether an expression is `message.content`, `message["content"]`, or a filter, test or slice of it."""
    unwrapped = _unwrapped(node)
    if isinstance(unwrapped, nodes.Getattr):
        return unwrapped.attr == "content" and _is_name(unwrapped.node, messages)
    if isinstance(unwrapped, nodes.Getitem) and isinstance(unwrapped.arg, nodes.Const):
        return bool(unwrapped.arg.value == "content") and _is_name(unwrapped.node, messages)
    return False


def _is_name(node: nodes.Node | None, names: Collection[str]) -> TypeGuard[nodes.Name]:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """An expression without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
