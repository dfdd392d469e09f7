"""Renders conversations by asking the engine, for models that have no chat template or another one.

vLLM renders the prompts of some models with Python code of its own: Mistral's, DeepSeek's, Kimi K3's, and
gpt-oss' in Harmony. Only the engine knows how, and it returns ids. Their text is used like the rendering of a
template, if the tokenizer gives the same ids for it; so the ids that are appended are always the engine's.
Where it is proved how the engine prints new texts, they are put into an earlier rendering (`Forms`).

A *form* is a conversation with words in place of its texts and of the ids of its calls. The engine renders a
form once, and again with several texts in their place. If each time it printed them as they were given, new
ones are put into that rendering. Where they are printed in another way, the engine renders each.

Example: a user's text in `</s>[INST]Hi[/INST]` is printed as it is; a result in
`[TOOL_RESULTS]{"content": "17 \\u00b0C"}[/TOOL_RESULTS]` is not.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from chat_tokenizer.added_tokens import AddedTokens
from chat_tokenizer.cache import BoundedCache, digest
from chat_tokenizer.encoder import Encoder
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported, TokenizationError
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.syntax import Syntax
from chat_tokenizer.turns import PLACEHOLDER_USER

_TEXTS = (
    " \n a b \n",
    '{"b": [1.50, true, null], "a": "<b>&amp;</b> \\u00e9 \\" \'", "b": 007}',
    '[{"type": "text", "text": "x"}]',
    "17",
    "\t<|x|> [X] <x> </x> {} {{ x }} %s \\n </think> /no_think ```\r\n\r\n",
    "# Grüße, e\u0301, 四, 🙂\u200d\u2060\ufb01\n\n\n   def f(x):\n\t return f'{x}' != \"y\"  # 123456789\n"
    "Привет, мир! नमस्ते. こんにちは、안녕, مرحبا שלום ไทย IT'S don't ½ ² — “q” ...\n \n",
)
"""What a form is tried with: blanks at both ends, JSON, numbers, syntax, many scripts."""
_PROVED_AFTER = 3
"""So many times the engine renders the messages of a form, which may not come again, before it is proved."""
_SHORTEST_ID = 8
"""Letters and digits. Shorter ids of calls, such as `call_1`, are few, and belong to the form."""
_Replace = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The rendering of a form."""

    pieces: list[str]
    """Texts, and the form's words between them."""
    tokens: int
    """The number of added tokens in it."""

    def filled(self, values: Mapping[str, str]) -> str:
        return "".join(values.get(piece, piece) for piece in self.pieces)


class Forms:
    """The forms that an engine renders. Safe to use from several threads."""

    def __init__(
        self,
        encoder: Encoder,
        added: AddedTokens,
        render: Callable[[Sequence[Message], RenderOptions], str],
    ) -> None:
        """`render` returns the text of the engine's rendering, and raises as `Renderer.text`."""
        self._encoder = encoder
        self._added = added
        self._render = render
        self._nonce = f"{random.getrandbits(40):010x}"  # so that no client can write a form's words
        self._tried = [text for text in _TEXTS if not added.find(text)]
        self._seen: BoundedCache[bytes, int] = BoundedCache(4096)
        self._patterns: BoundedCache[bytes, _Pattern | None] = BoundedCache(1024)

    def text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """The engine's rendering of messages: see `Renderer.text`."""
        texts: dict[str, str] = {}
        ids: dict[str, str] = {}

        def word(text: str) -> str:
            """White space is part of the form."""
            if not text.strip():
                return text
            texts[name := f"qX{self._nonce}t{len(texts)}Xq"] = text
            return name

        def other_id(value: str) -> str:
            if sum(map(str.isalnum, value)) < _SHORTEST_ID:
                return value
            return ids.setdefault(value, self._other_id(value, len(ids)))

        # the first message of the context is the same in all forms
        form = [messages[0], *_replaced(messages[1:], word, other_id)]
        key = digest(form, options.key())
        seen = self._seen.get(key) or 0
        if seen < _PROVED_AFTER and (texts or ids):
            self._seen.put(key, seen + 1)
            return self._render(messages, options)
        pattern = self._patterns.get_or_make(
            key, lambda: self._prove(form, list(texts), list(ids.values()), options)
        )
        if pattern is not None:
            text = pattern.filled({**texts, **{other: value for value, other in ids.items()}})
            # a message that spells an added token, alone or with what stands next to it
            if len(self._added.find(text)) == pattern.tokens:
                return text
        return self._render(messages, options)

    def _other_id(self, value: str, *number: int) -> str:
        """Another id with letters and digits in the same places."""
        characters = cycle(digest(self._nonce, number).hex())
        return re.sub(r"[A-Za-z0-9]", lambda _: next(characters), value)

    def _prove(
        self, form: Sequence[Message], texts: list[str], ids: list[str], options: RenderOptions
    ) -> _Pattern | None:
        """The rendering of a form; None if the engine refuses it, or prints texts or ids in another way."""
        try:
            rendered = self._render(form, options)
            words = "|".join(map(re.escape, [*texts, *ids]))
            pieces = re.split(f"({words})", rendered) if words else [rendered]
            pattern = _Pattern(pieces, len(self._added.find(rendered)))
            for number in range(len(self._tried) if words else 0):
                tried = [self._tried[(number + index) % len(self._tried)] for index in range(len(texts))]
                values = dict(zip(texts, tried, strict=True))
                values |= {word: self._other_id(word, index, number) for index, word in enumerate(ids)}
                expected = self._render(_replaced(form, _of(values), _of(values)), options)
                if self._encoder.encode(pattern.filled(values)) != self._encoder.encode(expected):
                    return None
        except TokenizationError:
            return None
        return pattern


def _of(values: Mapping[str, str]) -> _Replace:
    return lambda word: values.get(word, word)


def _replaced(messages: Sequence[Message], text: _Replace, call_id: _Replace) -> list[Message]:
    """Messages with other texts, but for those of assistants, and with other ids of calls."""
    ids = {"id": call_id, "tool_call_id": call_id}
    both = {**ids, "content": text, "text": text}
    return [_changed(message, ids if message.get("role") == "assistant" else both) for message in messages]


def _changed(value: Any, changes: Mapping[str, _Replace], field: str = "", depth: int = 3) -> Any:
    """A value with the strings of some fields changed, as deep as the parts of a content and calls are."""
    if isinstance(value, str):
        return changes[field](value) if field in changes else value
    if depth and isinstance(value, Mapping):
        return {name: _changed(inner, changes, name, depth - 1) for name, inner in value.items()}
    if depth and isinstance(value, list):
        return [_changed(inner, changes, field, depth - 1) for inner in value]
    return value


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

    syntax, remembered = _SYNTAX, None
    own_arguments = _OWN_ARGUMENTS
    content_format = None

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
