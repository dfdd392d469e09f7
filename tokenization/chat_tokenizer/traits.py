"""The form of messages that a chat template takes, read from its source as vLLM reads it.

So the answer is not what suits the template best, but what the engine passes to it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat_tokenizer.syntax import parse_source

ContentFormat = Literal["string", "openai"]
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Traits:
    """The form of messages for a template."""

    content_format: ContentFormat
    """"openai" is a list of parts, for templates that loop over a message's content; "string" is one text."""
    developer: bool
    """Whether it supports the role `developer`: its source holds the quoted word."""


def read_traits(source: str, content_format: ContentFormat | None = None) -> Traits:
    """The traits of a template, given its Jinja source; the content format is detected if None."""
    developer = '"developer"' in source or "'developer'" in source
    return Traits(content_format or detect_content_format(source), developer)


def takes_later_system(source: str) -> bool:
    """Whether the template renders a system message after the first message; not if it fails.

    vLLM's route for Anthropic's messages (vllm/entrypoints/anthropic/serving.py) renders such a conversation
    with the source alone: variables of the tokenizer and functions of its renderer are undefined there.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    conversation = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
    try:
        environment.from_string(source).render(messages=conversation, add_generation_prompt=False)
    except _FAILURES:
        return False
    return True


def detect_content_format(source: str) -> ContentFormat:
    """The format that vLLM detects for a template; "string" if the template has a syntax error.

    vLLM (`_detect_content_format` in vllm/renderers/hf.py) follows names alone, and no scopes.
    """
    try:
        return "openai" if _loops_over_content(parse_source(source)) else "string"
    except (TemplateError, RecursionError, _Unfollowed):
        return "string"


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
