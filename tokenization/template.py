"""A chat template as a function from messages to text.

Engines hand a template messages in a shape of their own choosing: content as text or as parts, arguments as
objects. The shape that a template can take is found out by rendering, once.
"""

import inspect
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenization.errors import InvalidMessages
from tokenization.messages import Message, for_template

Tools = Sequence[Mapping[str, Any]]
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
        """The rendering of messages in the shape that clients send.

        Raises:
            InvalidMessages: they are no messages, or the template refuses them.
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
            # the environment in which transformers compiles templates is not documented as thread safe
            with self._lock:
                # the request's own fields win over variables of the same name, as they do in vLLM
                text: str = self._tokenizer.apply_chat_template(
                    messages,
                    **{
                        **kwargs,
                        "tools": list(tools) if tools else None,
                        "add_generation_prompt": add_generation_prompt,
                        "tokenize": False,
                    },
                )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise InvalidMessages(f"the chat template refuses the messages: {error}") from error
        return text

    @cached_property
    def own_arguments(self) -> frozenset[str]:
        """Names of the rendering's own arguments, whose values do not reach the template as variables.

        `documents` and `add_generation_prompt` are both: they reach the template as they are.
        """
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        names = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
        return frozenset(names - {"documents", "add_generation_prompt"})

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it prints the text of content parts, and not their representation."""
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        text = self._try([{"role": "user", "content": parts}])
        return _FIRST in text and _SECOND in text and "'type'" not in text and '"type"' not in text

    def _try(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._render(messages, None, True, {})
        except InvalidMessages:
            return ""
