"""Renders conversations with one template, and tells the added tokens by what they do in its renderings.

The text is that of the package's own `Template`; `tests/campaign/templates/test_as_vllm.py` compares it with
vLLM's. Nothing else of the package is used to find what follows a turn.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chat_tokenizer import InvalidMessages
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.template import Template
from tests.support.templates.marks import MARKS
from tests.support.templates.shapes import TOOLS, Message, assistant, call, user

TemplateRefuses = InvalidMessages
"""The template raises an error for these messages."""
_USER_WORD, _NEXT_WORD = "newfirstword", "newsecondword"
_NO_ARGUMENTS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Token:
    """An added token in a text."""

    start: int
    end: int
    text: str


class Renderer:
    """A chat template with the transformers tokenizer that carries it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._template = Template(tokenizer)

    def render(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any] = _NO_ARGUMENTS, with_tools: bool = False
    ) -> str:
        """The text of a conversation, by default with a generation prompt. Raises TemplateRefuses."""
        kwargs = dict(kwargs)
        prompted = kwargs.pop("add_generation_prompt", True)
        return self._template.text(messages, RenderOptions(TOOLS if with_tools else None, prompted, kwargs))

    def render_alone(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any] = _NO_ARGUMENTS, with_tools: bool = False
    ) -> str | None:
        """A rendering without generation prompt; None if the template refuses the messages."""
        try:
            return self.render(messages, {**kwargs, "add_generation_prompt": False}, with_tools)
        except TemplateRefuses:
            return None

    @cached_property
    def reads_generation_prompt(self) -> bool:
        """Whether a prompt ends otherwise with `add_generation_prompt` than without.

        If not, a history alone may end with the header of the next turn.
        """
        alone = self.render_alone([user("Hi")])
        return alone is not None and alone != self.render([user("Hi")])

    @cached_property
    def added_tokens(self) -> re.Pattern[str]:
        """A pattern that matches each added token of the tokenizer."""
        tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def find(self, text: str) -> list[Token]:
        """The added tokens in a text, in order."""
        return [Token(*match.span(), match.group()) for match in self.added_tokens.finditer(text)]

    @cached_property
    def between_calls(self) -> frozenset[str]:
        """Added tokens that the template prints between two calls of one turn."""
        calls = [call(1, MARKS[0]), call(2, MARKS[1])]
        calls[1]["function"]["name"] = _NEXT_WORD
        turn = assistant("", tool_calls=calls)
        whole = self.render_alone([user("Hi"), turn], with_tools=True) or ""
        between = whole.partition(MARKS[0])[2].partition(_NEXT_WORD)
        found = frozenset(token.text for token in self.find(between[0] if between[1] else ""))
        # each call may be a message of its own
        return frozenset() if found & self.of_messages else found

    @cached_property
    def after_name(self) -> frozenset[str]:
        """Added tokens that the template prints between the name of a call and its arguments."""
        turn = assistant("", tool_calls=[call(1, MARKS[0], _NEXT_WORD)])
        whole = self.render_alone([user("Hi"), turn], with_tools=True) or ""
        between, found, _ = whole.partition(_NEXT_WORD)[2].partition(MARKS[0])
        # some templates print the name after the arguments
        return frozenset(token.text for token in self.find(between if found else ""))

    @cached_property
    def of_messages(self) -> frozenset[str]:
        """Added tokens between messages without calls."""
        return frozenset(token.text for text in self.between_messages for token in self.find(text))

    @cached_property
    def assistant_header(self) -> list[str]:
        """Added tokens that open an answer."""
        tokens = self.find(self.between_messages[0])
        return [token.text for token in tokens[self.closing_tokens_of_user :]]

    @cached_property
    def closes(self) -> frozenset[str]:
        """Added tokens that close a user message."""
        tokens = self.find(self.between_messages[0])
        return frozenset(token.text for token in tokens[: self.closing_tokens_of_user])

    @cached_property
    def openers(self) -> frozenset[str]:
        """Added tokens before the first user message."""
        whole = self.render_alone([user(_USER_WORD)]) or ""
        return frozenset(token.text for token in self.find(whole.partition(_USER_WORD)[0]))

    @cached_property
    def closing_tokens_of_user(self) -> int:
        """The number of added tokens that close a user message; 1 if the template does not tell."""
        if not self.reads_generation_prompt:
            return 1
        whole = self.render_alone([user(_USER_WORD)])
        return 1 if whole is None else len(self.find(whole.partition(_USER_WORD)[2]))

    @cached_property
    def between_messages(self) -> tuple[str, str]:
        """The text between a user message and an answer, and that between the answer and a user message."""
        try:
            whole = self.render([user(_USER_WORD), assistant(MARKS[0]), user(_NEXT_WORD)])
        except TemplateRefuses:
            return "", ""
        after_user, _, after_answer = whole.partition(_USER_WORD)[2].partition(MARKS[0])
        return after_user, after_answer.partition(_NEXT_WORD)[0]

    @cached_property
    def special(self) -> frozenset[str]:
        """The special ones among the added tokens: only these may end a turn."""
        tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in tokens if token.special)


def stem(token: str) -> str:
    """Equal for the two tokens of a pair: `tool_call` for `<tool_call>` and `<|tool_call_end|>`."""
    words = re.findall(r"[a-z]+", token.lower().replace("\u2581", "_"))
    return "_".join(word for word in words if word not in ("begin", "start", "end", "of"))
