"""Renders conversations by asking the engine, for models that have no chat template or another one.

vLLM renders the prompts of some models with Python code of its own: Mistral's, DeepSeek's, Kimi K3's, and
gpt-oss' in Harmony. Only the engine knows how, and it returns ids. Their text is used like the rendering of a
template, if the tokenizer gives the same ids for it; so the ids that are appended are always the engine's.
Where it is proved how the engine prints new texts, they are put into an earlier rendering (`Forms`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chat_tokenizer.added_tokens import AddedTokens
from chat_tokenizer.encoder import Encoder
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported
from chat_tokenizer.forms import Forms
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.syntax import Syntax
from chat_tokenizer.turns import PLACEHOLDER_USER

Render = Callable[[Sequence[Message], RenderOptions], list[int]]
"""Returns the ids that the engine renders. Raises InvalidMessages if it refuses the messages, and an error
that is no `TokenizationError` if it does not respond."""

_SYNTAX = Syntax(
    # texts that models and renderers treat in a special way
    strings=("</think>", "/no_think", "{}"),
    numbers=(),
    fields=(),
    kwargs={"enable_thinking": (), "thinking": (), "reasoning_effort": ("low", "medium", "high", "none")},
    complete=False,
)
"""What a renderer without a source may depend on. Other variables count as not tried."""
_OWN_ARGUMENTS = frozenset(
    {"chat_template", "continue_final_message", "conversation", "max_length", "messages", "padding"}
    | {"return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs"}
    | {"tools", "truncation"}
)


class EngineRenderer:
    """The engine as a `Renderer`. Safe to use from several threads, never on an event loop: it waits."""

    syntax = _SYNTAX
    own_arguments = _OWN_ARGUMENTS

    def __init__(self, encoder: Encoder, added: AddedTokens, render: Render, identity: bytes) -> None:
        """`identity`: equal for engines that render alike."""
        self.identity = identity
        self._encoder = encoder
        self._render = render
        self._forms = Forms(encoder, added, self._engine_text)

    def text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """See `Renderer.text`. Real histories are always rendered by the engine: they audit the rest."""
        given = [_for_engine(message) for message in messages]
        if given[:1] == [PLACEHOLDER_USER] and given[1:]:
            return self._forms.text(given, options)
        return self._engine_text(given, options)

    def _engine_text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        ids = self._render(messages, options)
        text = self._encoder.decode(ids)
        # texts that look like special tokens, halves of characters, and tokenisers that encode in parts
        if self._encoder.encode(text) != ids:
            raise TemplateUnsupported("the text of the engine's rendering does not have its ids")
        return text

    def refuse_merged(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> None:
        """See `Renderer.refuse_merged`: without a source, only the real history shows what is merged.

        Raises:
            TemplateUnsupported: there is no history, and a new message is a system or developer message.
        """
        if history is None and any(message.get("role") in ("system", "developer") for message in new):
            raise TemplateUnsupported(
                "the engine may merge system and developer messages into the first message: give `history`"
            )

    def takes_later_system(self) -> bool:
        """See `Renderer.takes_later_system`: the engine tells by a rendering."""
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            self._render(messages, RenderOptions())
        except InvalidMessages:
            return False
        return True

    def now(self) -> list[str]:
        """See `Renderer.now`: what follows a turn holds no time."""
        return []


def _for_engine(message: Message) -> Message:
    """A message in the one form that all of vLLM's renderers and routes take.

    Some refuse null, or lose the calls next to it; `/tokenize` knows one name of reasoning; the arguments of
    calls are JSON text.
    """
    given = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in given:
        given.setdefault("reasoning", given["reasoning_content"])
    if isinstance(calls := given.get("tool_calls"), list):
        given["tool_calls"] = [_with_json(call) for call in calls]
        given.setdefault("content", "")
    return given


def _with_json(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments: Any = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or isinstance(arguments, str):
        return call
    text = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
