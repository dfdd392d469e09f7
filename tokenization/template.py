"""Renders messages with a chat template.

An engine converts messages before it renders them: content to text or to parts, whichever the template takes,
and arguments to objects. One trial rendering shows which content a template takes.
"""

import inspect
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenization.errors import InvalidMessages
from tokenization.messages import Message, for_template
from tokenization.syntax import Syntax, read_syntax

Tools = Sequence[Mapping[str, Any]]
_RENDERING_ERRORS = (
    *(TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError),
    RecursionError,  # also where arguments are nested too deep to be printed as JSON
)
"""What the expressions of a template raise for messages that it was not written for."""
_FIRST, _SECOND = "qZfirstZq", "qZsecondZq"


class Template:
    """The chat template of a tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def text(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Render messages in the form that OpenAI clients send.

        Raises:
            InvalidMessages: a message is malformed, or the template refuses it.
        """
        converted = for_template(messages, parts=self._takes_parts)
        return self._render(converted, tools, add_generation_prompt, kwargs)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Tools | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        try:
            # the Jinja environment of transformers is not documented as thread-safe
            with self._lock:
                # fields of the request override template variables of the same name, as in vLLM
                text: str = self._tokenizer.apply_chat_template(
                    messages,
                    **{
                        **kwargs,
                        "tools": list(tools) if tools else None,
                        "add_generation_prompt": add_generation_prompt,
                        "tokenize": False,
                    },
                )
        except (*_RENDERING_ERRORS, TemplateError) as error:
            raise InvalidMessages(f"the chat template refuses the messages: {error}") from error
        return text

    @cached_property
    def syntax(self) -> Syntax:
        """The constants and variables of its source; of all of them if there are several."""
        template = self._tokenizer.chat_template
        sources = list(template.values()) if isinstance(template, dict) else [template]
        return read_syntax("\n".join(sources))

    @property
    def strings(self) -> tuple[str, ...]:
        """Text that its source compares with or looks for."""
        return self.syntax.strings

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

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template prints the texts in a list of content parts, not the list itself."""
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        text = self._render_or_empty([{"role": "user", "content": parts}])
        return _FIRST in text and _SECOND in text and "'type'" not in text and '"type"' not in text

    def _render_or_empty(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._render(messages, None, True, {})
        except InvalidMessages:
            return ""
