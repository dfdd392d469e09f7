"""Renders messages with a chat template, as vLLM renders them.

An engine selects one of the tokenizer's templates, and converts messages and tools to the form for the
template: content to text or to parts, arguments to objects, developer messages to system messages. The form
depends on the template's source only, and is determined once for each template.
"""

import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from chat_tokenizer.cache import BoundedCache
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported
from chat_tokenizer.messages import Message, changes_start, for_template, tools_for_template
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.syntax import Syntax, join_syntaxes, read_syntax
from chat_tokenizer.traits import ContentFormat, Traits, read_traits, takes_later_system


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
        self._traits: BoundedCache[str, Traits] = BoundedCache(8)
        self._lock = threading.Lock()

    def text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """Render messages in the form that OpenAI clients send.

        Raises:
            InvalidMessages: a message is malformed, the template refuses it, or it fails on it.
        """
        source = self._source(options)
        traits = self.traits(source)
        converted = for_template(
            messages, parts=traits.content_format == "openai", developer=traits.developer
        )
        # vLLM leaves out arguments that are null or "auto", so that the server's defaults apply
        given = {
            name: value for name, value in options.kwargs.items() if value is not None and value != "auto"
        }
        # fields of the request override template variables of the same name, as in vLLM
        arguments = {
            **self._defaults,
            **given,
            "chat_template": source,
            "tools": tools_for_template(options.tools),
            "add_generation_prompt": options.add_generation_prompt,
            "tokenize": False,
        }
        return self._render(converted, arguments)

    def refuse_merged(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> None:
        """Refuse new messages that an engine merges into the first message of the conversation.

        Raises:
            TemplateUnsupported: a new message changes the start of the rendering.
            InvalidMessages: the tokenizer has no template to render the messages with.
        """
        if changes_start(new, history) and not self.traits(self._source(options)).developer:
            raise TemplateUnsupported(
                "the template does not know the role `developer`, so the engine merges system and developer "
                "messages into the first message, and none can be appended: send it as a user message"
            )

    def traits(self, source: str) -> Traits:
        """The form of messages that the engine reads from the source of a template."""
        return self._traits.get_or_make(source, lambda: read_traits(source, self._content_format))

    @cached_property
    def syntax(self) -> Syntax:
        """The constants and variables of its source; of all of them if there are several."""
        template = self._tokenizer.chat_template
        sources = list(template.values()) if isinstance(template, dict) else [template]
        return join_syntaxes([read_syntax(source) for source in sources])

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
            sources = self._source(RenderOptions()), self._source(RenderOptions([{}]))
        except InvalidMessages:
            return False
        return all(map(takes_later_system, sources))

    def now(self) -> list[str]:
        """The time in the forms that the template prints: equal times give equal renderings."""
        time = datetime.now()
        return [time.strftime(form) for form in self.syntax.time_formats]

    @cached_property
    def own_arguments(self) -> frozenset[str]:
        """Names of the renderer's arguments that do not reach the template as variables.

        `documents` and `add_generation_prompt` are arguments too, but reach the template unchanged.
        """
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        names = {
            parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        return frozenset(names - {"documents", "add_generation_prompt"})

    def _source(self, options: RenderOptions) -> str:
        """The source of the template for a request: tokenizers may have several, one of them for tools."""
        try:
            source = self._tokenizer.get_chat_template(
                options.kwargs.get("chat_template") or None, options.tools or None
            )
        except (ValueError, TypeError) as error:
            raise InvalidMessages(f"the tokenizer has no chat template for the messages: {error}") from error
        if not isinstance(source, str):
            raise InvalidMessages("the template argument `chat_template` must be a string")
        return source

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        try:
            # the Jinja environment of transformers is not documented as thread-safe
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:  # the boundary: a template is a program, and may raise anything
            raise InvalidMessages(_reason(error)) from error
        return text


def _reason(error: Exception) -> str:
    """The error message for a template that failed."""
    from jinja2 import TemplateError, TemplateSyntaxError

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
