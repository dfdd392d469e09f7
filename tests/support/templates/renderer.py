"""Renders a conversation to text, for the oracle.

The text is that of the package's own `Template`; `tests/campaign/templates/test_as_vllm.py` compares it with
vLLM's. Nothing else of the package is used to find what follows a turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.templates.shapes import Message
from tokenization import InvalidMessages
from tokenization.template import Template, Tools

TemplateRefuses = InvalidMessages
"""The template raises an error for these messages."""


class Renderer:
    """A chat template with the tokenizer that carries it."""

    def __init__(self, tokenizer: Any) -> None:
        self._template = Template(tokenizer)

    def render(self, messages: Sequence[Message], tools: Tools | None, kwargs: Mapping[str, Any]) -> str:
        """The text of a conversation. `kwargs` may hold `add_generation_prompt`. Raises TemplateRefuses."""
        kwargs = dict(kwargs)
        return self._template.text(messages, tools, kwargs.pop("add_generation_prompt", False), kwargs)
