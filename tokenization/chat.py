"""The tokenizer of a chat model: render a conversation, or append to one that is already ids.

Law, for every call that returns:

    out.prompt_ids[: len(prompt_ids)] == prompt_ids

Sampled ids are never decoded. Only the text that the template puts behind the last assistant turn is
encoded, and it is cut out of the template's own rendering.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenization.cache import BoundedCache, CacheInfo
from tokenization.errors import (
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizerUnavailable,
)
from tokenization.messages import Message, for_template

_MARK = "qZ7assistantZq"
"""Text of the stand-in assistant turn; only its position in a rendering matters."""


@dataclass(frozen=True, slots=True)
class Suffix:
    """What follows a sampled turn: shared by every conversation that gets the same new messages."""

    stop_id: int
    """The token with which the template closes an assistant turn."""
    ids: tuple[int, ...]
    """Everything behind that token: separators, the new messages, the generation prompt."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The next prompt of a conversation."""

    prompt_ids: list[int]
    """The whole next prompt: the ids given, then `close_ids`, then `suffix_ids`."""
    close_ids: list[int]
    """Ids inserted to close the turn because the model did not sample them; empty if it did."""
    suffix_ids: list[int]
    """Ids of separators, new messages and generation prompt."""


@dataclass(frozen=True, slots=True)
class _Bridge:
    """Where a template's rendering of a stand-in turn ends, for one set of tools and arguments."""

    history: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: dict[str, Any]
    text: str
    stop_id: int
    stop_at: int
    """Offset in `text` of the stop token that closes the stand-in turn."""


@dataclass
class ChatTokenizer:
    """A fast tokenizer with its chat template. Safe to use from several threads."""

    source: str
    """Folder or hub name it was loaded from."""
    vocab_size: int
    """Ids below this exist, in the tokenizer or in the model's embedding."""
    _tokenizer: Any
    _backend_json: str
    _threads: threading.local = field(default_factory=threading.local)
    _render_lock: threading.Lock = field(default_factory=threading.Lock)
    _bridges: BoundedCache[bytes, _Bridge] = field(default_factory=lambda: BoundedCache(256))
    _suffixes: BoundedCache[bytes, Suffix] = field(default_factory=lambda: BoundedCache(4096))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | None = None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "ChatTokenizer":
        """Load tokenizer and template from a folder or a hub name.

        Args:
            folder: a model folder, or a name that the Hugging Face hub (or its cache) knows.
            chat_template: Jinja text that replaces the model's own template.

        Raises:
            TokenizerUnavailable: nothing loadable there, no fast tokenizer, or no chat template.
        """
        from transformers import AutoTokenizer, PretrainedConfig  # slow to import, so only when needed

        source = str(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TokenizerUnavailable(f"cannot load a tokenizer from {source!r}: {error}") from error
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if not tokenizer.chat_template:
            raise TokenizerUnavailable(f"the tokenizer in {source!r} has no chat template")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerUnavailable(f"{source!r} has no fast tokenizer (tokenizer.json)")
        sizes = [len(tokenizer)]
        try:
            config, _ = PretrainedConfig.get_config_dict(source, revision=revision)
            sizes += [c.get("vocab_size") or 0 for c in (config, config.get("text_config") or {})]
        except OSError:
            pass  # a folder with a tokenizer alone is fine: its own size holds
        return cls(source, max(sizes), tokenizer, backend.to_str())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a whole conversation, as the engine would tokenise it.

        Raises:
            InvalidMessages: the template refuses the messages.
        """
        text = self._text(for_template(messages), tools, add_generation_prompt, template_kwargs)
        return self.encode(text)

    def append(
        self,
        prompt_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Appended:
        """The next prompt: `prompt_ids` untouched, then what the template puts behind them.

        Args:
            prompt_ids: everything so far, sampled ids included.
            new_messages: what happened since the sampled turn: tool results, user text.

        Raises:
            InvalidIds: no ids.
            InvalidMessages: the template refuses the new messages.
            TemplateUnsupported: the template gives no safe place to append.
        """
        if not prompt_ids:
            raise InvalidIds("must not be empty")
        suffix = self.suffix(
            new_messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        close = close_of(prompt_ids[-1], suffix)
        return Appended([*prompt_ids, *close, *suffix.ids], close, list(suffix.ids))

    def suffix(
        self,
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Suffix:
        """What follows the stop token of a sampled turn. Cached; the cost is that of `new_messages`.

        Raises: as `append`.
        """
        if not new_messages:
            raise InvalidMessages("must not be empty")
        converted = for_template(new_messages)
        answered = _leading_results(converted)
        key = _digest(converted, list(tools) if tools else None, template_kwargs, add_generation_prompt)

        def make() -> Suffix:
            found = [
                self._behind(self._bridge(calls, tools, template_kwargs), converted, add_generation_prompt)
                for calls in _stand_in_calls(answered)
            ]
            if any(other != found[0] for other in found[1:]):
                raise TemplateUnsupported(
                    "the template prints details of the tool calls beside their results, "
                    "which ids and new messages alone do not tell"
                )
            return found[0]

        return self._suffixes.get_or_make(key, make)

    def stop_id(self, *, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any) -> int:
        """The token with which the template closes an assistant turn.

        Raises:
            TemplateUnsupported: it closes turns with text that is not a token of its own.
        """
        return self._bridge([], tools, template_kwargs).stop_id

    def encode(self, text: str) -> list[int]:
        """Ids of a text with nothing added around it. Releases the GIL while it works.

        Raises:
            InvalidMessages: the text holds half of a surrogate pair.
        """
        try:
            ids: list[int] = self._own_backend().encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # a lone surrogate: half of a character that was cut in two
            raise InvalidMessages("the text holds something that is not Unicode") from error
        return ids

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        backend = self._own_backend()
        return [backend.id_to_token(token) or "" for token in ids]

    def cache_info(self) -> CacheInfo:
        """Hits and misses of the suffix cache."""
        return self._suffixes.info()

    def _bridge(
        self,
        calls: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> _Bridge:
        key = _digest(calls, list(tools) if tools else None, template_kwargs)
        return self._bridges.get_or_make(key, lambda: self._find_bridge(calls, tools, dict(template_kwargs)))

    def _find_bridge(
        self,
        calls: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> _Bridge:
        """Find how the template closes an assistant turn, by rendering one whose text is known."""
        turn: dict[str, Any] = {"role": "assistant", "content": _MARK}
        plain = [{"role": "user", "content": "."}, turn]
        text = self._text(plain, tools, False, template_kwargs)
        behind = text[text.rfind(_MARK) + len(_MARK) :]
        if _MARK not in text or not behind:
            raise TemplateUnsupported("the template puts nothing behind an assistant turn")
        stop_id = self.encode(behind)[0]
        stop_text = self._own_backend().id_to_token(stop_id)
        if stop_id not in self._tokenizer.added_tokens_decoder or not behind.startswith(stop_text):
            raise TemplateUnsupported(
                f"the template closes an assistant turn with {behind!r}, "
                "which does not begin with a token of its own"
            )
        if calls:
            turn["tool_calls"] = calls
            text = self._text(plain, tools, False, template_kwargs)
        stop_at = text.rfind(stop_text)
        if stop_at < text.rfind(_MARK):
            raise TemplateUnsupported("the template does not close a turn that calls tools")
        return _Bridge(plain, tools, template_kwargs, text, stop_id, stop_at)

    def _behind(
        self, bridge: _Bridge, converted: list[dict[str, Any]], add_generation_prompt: bool
    ) -> Suffix:
        """Encode what the template puts behind the stand-in turn's stop token."""
        whole = self._text(
            [*bridge.history, *converted], bridge.tools, add_generation_prompt, bridge.template_kwargs
        )
        if not whole.startswith(bridge.text):
            raise TemplateUnsupported(
                "the template rewrites an assistant turn when messages follow it, "
                "so what it would put behind the sampled ids is not certain"
            )
        ids = self.encode(whole[bridge.stop_at :])
        if ids[0] != bridge.stop_id:
            raise TemplateUnsupported("the tokenizer merges the stop token with the text behind it")
        return Suffix(bridge.stop_id, tuple(ids[1:]))

    def _text(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        from jinja2 import TemplateError

        try:
            # transformers compiles and caches the template; its environment is not documented as thread safe
            with self._render_lock:
                text: str = self._tokenizer.apply_chat_template(
                    messages,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **template_kwargs,
                )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidMessages(f"the chat template refuses the messages: {error}") from error
        return text

    def _own_backend(self) -> Any:
        """This thread's copy of the tokenizer: one shared by threads fails with "Already borrowed"."""
        backend = getattr(self._threads, "backend", None)
        if backend is None:
            from tokenizers import Tokenizer

            backend = self._threads.backend = Tokenizer.from_str(self._backend_json)
        return backend


def close_of(last_id: int, suffix: Suffix) -> list[int]:
    """Ids that close a turn which ended in `last_id`: none if the model sampled the stop token itself."""
    return [] if last_id == suffix.stop_id else [suffix.stop_id]


def _leading_results(messages: Sequence[Message]) -> int:
    """How many tool results stand at the head of `messages`."""
    for count, message in enumerate(messages):
        if message["role"] != "tool":
            return count
    return len(messages)


def _stand_in_calls(count: int) -> list[list[dict[str, Any]]]:
    """Tool calls for the stand-in turn, in two spellings: what follows must not depend on the spelling."""
    if not count:
        return [[]]
    return [
        [
            {"id": f"{spelling}{index}", "type": "function", "function": {"name": spelling, "arguments": {}}}
            for index in range(count)
        ]
        for spelling in ("alpha", "omega")
    ]


def _digest(*parts: object) -> bytes:
    """A key for JSON-like values; order inside objects counts, because templates print it."""
    text = json.dumps(parts, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
