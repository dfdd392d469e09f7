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
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenization.cache import BoundedCache, CacheInfo
from tokenization.discovery import Discovery, Ending, Found, digest
from tokenization.errors import (
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizerUnavailable,
    UnfinishedTurn,
)
from tokenization.messages import Message, for_template
from tokenization.notes import TURN_END_REWRITTEN, differences
from tokenization.template import Template, Tools
from tokenization.turns import Cut, Setting, cut_after_other_stop, cut_after_stop

Unfinished = Literal["close", "continue", "reject"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a sampled turn; independent of the ids before it."""

    close_ids: tuple[int, ...]
    """Ids that close the turn because the model did not sample them; empty if it did."""
    suffix_ids: tuple[int, ...]
    """Separators, new messages, generation prompt."""
    notes: tuple[str, ...] = ()
    """What the template would have shown otherwise."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The next prompt of a conversation."""

    prompt_ids: list[int]
    """The whole next prompt: the ids given, then `close_ids`, then `suffix_ids`."""
    close_ids: list[int]
    """Ids inserted to close the turn because the model did not sample them; empty if it did."""
    suffix_ids: list[int]
    """Ids of separators, new messages and generation prompt."""
    notes: tuple[str, ...] = ()
    """What the template would have shown otherwise."""


@dataclass
class ChatTokenizer:
    """A fast tokenizer with its chat template. Safe to use from several threads."""

    source: str
    """Folder or hub name it was loaded from."""
    vocab_size: int
    """Ids below this exist, in the tokenizer or in the model's embedding."""
    _tokenizer: Any
    _backend_json: str
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a turn of this model: its EOS and what its generation config lists beside it."""
    _threads: threading.local = field(default_factory=threading.local)
    _suffixes: BoundedCache[bytes, Continuation] = field(
        default_factory=lambda: BoundedCache(1024, lambda following: len(following.suffix_ids) <= 2_048)
    )

    def __post_init__(self) -> None:
        self._template = Template(self._tokenizer)
        self._own = {added.content: number for number, added in self._tokenizer.added_tokens_decoder.items()}
        self._names = {number: content for content, number in self._own.items()}
        self._discovery = Discovery(self._template, self._own)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, the same wherever vocabulary, merges and chat template are the same."""
        template = self._tokenizer.chat_template
        shown = template if isinstance(template, str) else json.dumps(template, sort_keys=True, default=repr)
        both = hashlib.blake2b(self._backend_json.encode(), digest_size=16)
        both.update(b"\0" + shown.encode("utf-8", "surrogatepass"))
        return both.hexdigest()

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
        from transformers import AutoTokenizer  # slow to import, so only when needed

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
        config, generation = (
            _config(source, "config.json", revision),
            _config(source, "generation_config.json", revision),
        )
        sizes = [c.get("vocab_size") or 0 for c in (config, config.get("text_config") or {})]
        stops = generation.get("eos_token_id", config.get("eos_token_id"))
        stops = stops if isinstance(stops, list) else [stops]
        known = frozenset(stop for stop in [tokenizer.eos_token_id, *stops] if isinstance(stop, int))
        return cls(source, max([len(tokenizer), *sizes]), tokenizer, backend.to_str(), known)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a whole conversation, as the engine would tokenise it.

        Raises:
            InvalidMessages: the template refuses the messages.
        """
        return self.encode(self._template.text(messages, tools, add_generation_prompt, template_kwargs or {}))

    def append(
        self,
        prompt_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
        finish_reason: str | None = "stop",
        stop_reason: str | int | None = None,
        unfinished: Unfinished = "close",
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Appended:
        """The next prompt: `prompt_ids` untouched, then what the template puts behind them.

        Args:
            prompt_ids: everything so far, sampled ids included.
            new_messages: what happened since the sampled turn: tool results, user text.
            history: the messages that led to `prompt_ids`, the last assistant turn included; needed
                only by templates that print details of earlier messages next to new ones.
            finish_reason: how the turn ended, as the engine said it.
            stop_reason: the stop string or token that ended it, as vLLM says it.
            template_kwargs: variables of the template; any name is allowed, except those that `reserved`
                returns.
            unfinished: what to do with a turn cut off by its length, a stop string or an abort: close it with
                ids that were never sampled (to be masked), continue it (then there are no new
                messages), or reject it.

        Raises:
            InvalidIds: no ids.
            InvalidMessages: the template refuses the new messages.
            TemplateUnsupported: there is no place where it is certain what to append.
            UnfinishedTurn: the turn was cut off, and `unfinished` is "reject".
        """
        if not prompt_ids:
            raise InvalidIds("must not be empty")
        following = self.continuation(
            prompt_ids[-1],
            new_messages,
            history=history,
            tools=tools,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            unfinished=unfinished,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        close, suffix = list(following.close_ids), list(following.suffix_ids)
        notes = following.notes
        if history:
            setting = Setting(tools, add_generation_prompt, template_kwargs or {})
            notes += differences(self._template, history[-1], new_messages, setting)
        return Appended([*prompt_ids, *close, *suffix], close, suffix, notes)

    def continuation(
        self,
        last_id: int,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
        finish_reason: str | None = "stop",
        stop_reason: str | int | None = None,
        unfinished: Unfinished = "close",
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Continuation:
        """What follows ids that end with `last_id`. Arguments and errors are those of `append`."""
        cut_off = finish_reason in ("length", "abort") or isinstance(stop_reason, str)
        if cut_off and unfinished == "reject":
            raise UnfinishedTurn(f"the turn was cut off ({stop_reason or finish_reason})")
        if cut_off and unfinished == "continue":
            if new_messages:
                raise InvalidMessages("a turn that is continued takes no new messages")
            return Continuation((), ())
        if not new_messages:
            raise InvalidMessages("must not be empty")
        if history is not None:
            for_template(history[:1])
            if not history or for_template(history[-1:])[0]["role"] != "assistant":
                raise InvalidMessages("`history` must end with the assistant turn")
        setting = Setting(tools, add_generation_prompt, template_kwargs or {})
        found = self._discovery.follow(new_messages, history, setting)
        cut = self._cut(found, last_id, stop_reason, cut_off)
        prefix = cut.left
        if not prefix and not self._discovery.starts_with_own_token(found.close.text[cut.at :]):
            prefix = self._names.get(last_id, "")
        key = found.key + digest(cut.at, cut.closed, prefix)
        return self._suffixes.get_or_make(key, lambda: self._encode_behind(found, cut, prefix))

    def ending(
        self,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Ending:
        """How the last turn ends in the template's eyes. Arguments and errors are those of `append`."""
        setting = Setting(tools, add_generation_prompt, template_kwargs or {})
        return self._discovery.ending(new_messages, history, setting)

    def reserved(self, template_kwargs: Mapping[str, Any]) -> list[str]:
        """Names in `template_kwargs` that are arguments of the rendering itself, not variables of a template.

        An engine may give them effects that a template cannot have (`truncation`, `chat_template`, ...), so
        nothing is appended to a conversation that sets one.
        """
        return sorted(self._template.own_arguments & template_kwargs.keys())

    def assistant_header(self) -> str:
        """What the template puts between a closed message and an assistant's text; may be empty."""
        return self._discovery.assistant_header()

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's rendering of a conversation. Raises InvalidMessages."""
        return self._template.text(messages, tools, add_generation_prompt, template_kwargs or {})

    def stop_id(self, *, tools: Tools | None = None, template_kwargs: Mapping[str, Any] | None = None) -> int:
        """The token with which the template closes an assistant turn.

        Raises:
            TemplateUnsupported: it closes turns with text that is not a token of its own.
        """
        close = self._discovery.content_close(Setting(tools, False, template_kwargs or {}))
        tokens = self._discovery.tokens(close)
        if not tokens:
            raise TemplateUnsupported(
                f"the template closes an assistant turn with {close!r}, which holds no token of its own"
            )
        return tokens[-1].id

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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included: for people and comparisons, never to be encoded again."""
        text: str = self._own_backend().decode(list(ids), skip_special_tokens=False)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        backend = self._own_backend()
        return [backend.id_to_token(token) or "" for token in ids]

    def cache_info(self) -> CacheInfo:
        """Hits and misses of the suffix cache."""
        return self._suffixes.info()

    def _cut(self, found: Found, last_id: int, stop_reason: str | int | None, cut_off: bool) -> Cut:
        shown = cut_after_stop(found.close, found.tokens, found.alone, last_id)
        if shown is not None:
            return shown
        ends_turns = last_id in self.stop_ids or last_id == stop_reason
        if cut_off or not ends_turns or last_id in found.syntax:
            return Cut(0)
        return cut_after_other_stop(found.close, found.tokens, found.alone, self._discovery.opening)

    def _encode_behind(self, found: Found, cut: Cut, prefix: str) -> Continuation:
        """Encode what stands behind the cut, with the token before it as context where there is one."""
        rest = found.close.text[cut.at :]
        notes = (TURN_END_REWRITTEN,) if cut.rewritten else ()
        if not rest:
            return Continuation((), (), notes)
        if prefix:
            first, *ids = self.encode(prefix + rest)
            if first != self._own[prefix]:
                raise TemplateUnsupported("the tokenizer merges the stop token with the text behind it")
        elif self._discovery.starts_with_own_token(rest):
            ids = self.encode(rest)
        else:
            raise TemplateUnsupported(
                f"the template goes on with {rest[:40]!r} where the turn was cut off, "
                "and the tokenizer may merge that with what the model sampled"
            )
        closing = [t.id for t in found.tokens if cut.at <= t.start and t.end <= found.close.shared]
        count = _covering(ids, closing)
        return Continuation(tuple(ids[:count]), tuple(ids[count:]), notes)

    def _own_backend(self) -> Any:
        """This thread's copy of the tokenizer: one shared by threads fails with "Already borrowed"."""
        backend = getattr(self._threads, "backend", None)
        if backend is None:
            from tokenizers import Tokenizer

            backend = Tokenizer.from_str(self._backend_json)
            # a tokenizer.json may ask for both; engines encode whole prompts, and nothing else
            backend.no_truncation()
            backend.no_padding()
            self._threads.backend = backend
        return backend


def _config(source: str, name: str, revision: str | None) -> dict[str, Any]:
    """A configuration file of the model; empty where there is none: a tokenizer alone is fine."""
    from transformers.utils import cached_file

    try:
        file = cached_file(source, name, revision=revision)
        content = json.loads(Path(file).read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _covering(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """How many of the first ids it takes to hold `wanted` in order."""
    position = 0
    for token in wanted:
        position = ids.index(token, position) + 1
    return position
