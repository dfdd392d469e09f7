"""Renders messages with a chat template, as vLLM renders them.

An engine selects one of the tokenizer's templates, and converts messages and tools to the form for the
template: content to text or to parts, arguments to objects, developer messages to system messages. The form
depends on the template's source only, and is determined once for each template.
"""

import inspect
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, SupportsIndex, TypeGuard, overload

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat_tokenizer.cache import BoundedCache
from chat_tokenizer.errors import InvalidMessages, Stopped, TemplateUnsupported
from chat_tokenizer.messages import Message, arguments_for_template, for_template, tools_for_template
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.syntax import Syntax, join_syntaxes, parse_source, read_syntax

ContentFormat = Literal["string", "openai"]
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of a template, and the form of messages for it, which vLLM reads from the source."""

    text: str
    content_format: ContentFormat
    """"openai" is a list of parts, for templates that loop over a message's content; "string" is one text."""
    developer: bool
    """Whether it supports the role `developer`: its source holds the quoted word."""


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


class _Stoppable(list[dict[str, Any]]):
    """Messages for a template, whose rendering ends where it reads a message and nobody waits for it.

    Python cannot end a thread, and there are templates that read all messages again for each message.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], stopped: Callable[[], bool]) -> None:
        super().__init__(messages)
        self._stopped = stopped

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for message in super().__iter__():
            if self._stopped():
                raise Stopped
            yield message

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "_Stoppable": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "dict[str, Any] | _Stoppable":
        if self._stopped():
            raise Stopped
        if isinstance(index, slice):
            return _Stoppable(super().__getitem__(index), self._stopped)
        return super().__getitem__(index)


class Template:
    """The chat template of a tokenizer: a `Renderer`. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        content_format: ContentFormat | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`content_format` is detected if None; `defaults` are template variables for all renderings."""
        self._tokenizer = tokenizer
        self._content_format = content_format
        self._defaults = dict(defaults or {})
        self._sources: BoundedCache[str, _Source] = BoundedCache(8)
        self._lock = threading.Lock()
        template = tokenizer.chat_template
        sources = list(template.values()) if isinstance(template, dict) else [template or ""]
        self.syntax: Syntax = join_syntaxes([read_syntax(source) for source in sources])
        """The constants and variables of its source; of all of them if there are several."""
        short = BoundedCache[bytes, str](256, lambda text: len(text) <= 2**16)
        self.remembered = short if self.syntax.complete else None
        """See `Renderer.remembered`."""
        formats = {content_format or detect_content_format(source) for source in sources}
        self.content_format = formats.pop() if len(formats) == 1 else None
        """That of its source; None if it has several that differ."""
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        names = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
        self.own_arguments = frozenset(names - {"documents", "add_generation_prompt"})
        """Names of the renderer's arguments that do not reach the template as variables; those two do."""

    def text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """Render messages in the form that OpenAI clients send.

        Raises:
            InvalidMessages: a message is malformed, the template refuses it, or it fails on it.
            Stopped: the caller no longer waits.
        """
        source = self._source(options)
        converted = for_template(
            messages, parts=source.content_format == "openai", developer=source.developer
        )
        # fields of the request override template variables of the same name, as in vLLM
        arguments = {
            **self._defaults,
            **arguments_for_template(options.kwargs),
            "chat_template": source.text,
            "tools": tools_for_template(options.tools),
            "add_generation_prompt": options.add_generation_prompt,
            "tokenize": False,
        }
        stoppable = _Stoppable(converted, options.stopped)
        try:
            # the Jinja environment of transformers is not documented as thread-safe
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(stoppable, **arguments)
        except Stopped:
            raise
        except Exception as error:  # the boundary: a template is a program, and may raise anything
            raise InvalidMessages(_reason(error)) from error
        return text

    def refuse_merged(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> None:
        """Refuse new messages that an engine merges into the first message of the conversation.

        Raises:
            TemplateUnsupported: a new message changes the start of the rendering.
            InvalidMessages: the tokenizer has no template to render the messages with.
        """
        roles = [message.get("role") for message in new]
        merged = "developer" in roles
        if "system" in roles and not merged:
            # a history with a developer message has all of its system messages merged
            earlier = (message for message in history or () if isinstance(message, Mapping))
            merged = any(message.get("role") == "developer" for message in earlier)
        if merged and not self._source(options).developer:
            raise TemplateUnsupported(
                "the template does not know the role `developer`, so the engine merges system and developer "
                "messages into the first message, and none can be appended: send it as a user message"
            )

    @cached_property
    def identity(self) -> bytes:
        """See `Renderer.identity`: the source of the template and its settings."""
        template = self._tokenizer.chat_template
        source = template if isinstance(template, str) else json.dumps(template, sort_keys=True, default=repr)
        identity = source.encode("utf-8", "surrogatepass")
        if self._content_format or self._defaults:
            settings = [self._content_format, self._defaults]
            identity += b"\0" + json.dumps(settings, sort_keys=True, default=repr).encode()
        return identity

    def takes_later_system(self) -> bool:
        """Whether the templates for requests with and without tools take later system messages."""
        try:
            sources = [self._source(RenderOptions(tools)).text for tools in (None, [dict[str, Any]()])]
        except InvalidMessages:
            return False
        return all(map(takes_later_system, sources))

    def now(self) -> list[str]:
        """The time in the forms that the template prints: equal times give equal renderings."""
        time = datetime.now()
        return [time.strftime(form) for form in self.syntax.time_formats]

    def _source(self, options: RenderOptions) -> _Source:
        """The source of the template for a request: tokenizers may have several, one of them for tools."""
        try:
            source = self._tokenizer.get_chat_template(
                options.kwargs.get("chat_template") or None, options.tools or None
            )
        except (ValueError, TypeError) as error:
            raise InvalidMessages(f"the tokenizer has no chat template for the messages: {error}") from error
        if not isinstance(source, str):
            raise InvalidMessages("the template argument `chat_template` must be a string")
        developer = '"developer"' in source or "'developer'" in source
        return self._sources.get_or_make(
            source, lambda: _Source(source, self._content_format or detect_content_format(source), developer)
        )


def _reason(error: Exception) -> str:
    """The error message for a template that failed."""
    if isinstance(error, TemplateSyntaxError):
        return f"the chat template cannot be compiled: line {error.lineno}: {error.message}"
    if isinstance(error, TemplateError):
        return f"the chat template refuses the messages: {error}"
    return f"the chat template fails on the messages: {type(error).__name__}: {error}"


def merge_templates(
    own: str | Mapping[str, str] | None, processor: str | None
) -> str | Mapping[str, str] | None:
    """The templates of a model whose processor has one too: vLLM uses the processor's unless there are tools.

    Args:
        own: the tokenizer's template, or its templates by name.
        processor: the processor's template.

    Returns:
        the templates in the form that a tokenizer holds them.
    """
    if processor is None or processor == own:
        return own
    with_tools = own.get("tool_use", own.get("default")) if isinstance(own, Mapping) else own
    return {"default": processor, "tool_use": with_tools} if with_tools else processor
