"""The tokenizer of a chat model: render a conversation, or append to one that is already ids.

Law, for every call that returns:

    out.prompt_ids[: len(prompt_ids)] == prompt_ids

Sampled ids are never decoded. Only the text that the template puts behind the last assistant turn is
encoded, and it is cut out of the template's own rendering.
"""

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenization.cache import BoundedCache, CacheInfo
from tokenization.errors import (
    InvalidIds,
    InvalidMessages,
    TemplateUnsupported,
    TokenizationError,
    TokenizerUnavailable,
    UnfinishedTurn,
)
from tokenization.messages import Message
from tokenization.template import Template, Tools
from tokenization.turns import (
    ASKING,
    FIRST_RESULT,
    SECOND_RESULT,
    Cut,
    Setting,
    Tail,
    Token,
    close_start,
    cut_after_other_stop,
    cut_after_stop,
    skeleton,
    stand_ins,
    tail,
    two_results,
)

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


@dataclass(frozen=True, slots=True)
class Ending:
    """How a template ends an assistant turn and goes on."""

    close: str
    """What closes it; empty where the next message's opening does."""
    stops: list[str]
    """The token that ends it, and the one it is rewritten to when messages follow, if that differs."""
    opening: str | None
    """The token that follows a turn without a close of its own."""
    behind: str
    """Everything behind the close."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of one continuation, whatever the ids before it."""

    key: bytes
    close: Tail
    """What stands behind the turn's own syntax."""
    tokens: tuple[Token, ...]
    alone: tuple[Token, ...]
    syntax: frozenset[int]
    """Tokens of the syntax between the last thing written and the close."""


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
    _found: BoundedCache[bytes, _Found] = field(default_factory=lambda: BoundedCache(4096))
    _suffixes: BoundedCache[bytes, Continuation] = field(default_factory=lambda: BoundedCache(4096))

    def __post_init__(self) -> None:
        self._template = Template(self._tokenizer)
        self._own = {added.content: number for number, added in self._tokenizer.added_tokens_decoder.items()}
        self._names = {number: content for content, number in self._own.items()}
        longest_first = sorted(self._own, key=len, reverse=True)
        self._own_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

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
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a whole conversation, as the engine would tokenise it.

        Raises:
            InvalidMessages: the template refuses the messages.
        """
        return self.encode(self._template.text(messages, tools, add_generation_prompt, template_kwargs))

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
        **template_kwargs: Any,
    ) -> Appended:
        """The next prompt: `prompt_ids` untouched, then what the template puts behind them.

        Args:
            prompt_ids: everything so far, sampled ids included.
            new_messages: what happened since the sampled turn: tool results, user text.
            history: the messages that led to `prompt_ids`, the last assistant turn included; needed
                only by templates that print details of earlier messages beside new ones.
            finish_reason: how the turn ended, as the engine said it.
            stop_reason: the stop string or token that ended it, as vLLM says it.
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
            **template_kwargs,
        )
        close, suffix = list(following.close_ids), list(following.suffix_ids)
        return Appended([*prompt_ids, *close, *suffix], close, suffix, following.notes)

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
        **template_kwargs: Any,
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
        if history is not None and (not history or history[-1].get("role") != "assistant"):
            raise InvalidMessages("`history` must end with the assistant turn")
        setting = Setting(tools, add_generation_prompt, template_kwargs)
        found = self._continue(new_messages, history, setting)
        cut = self._cut(found, last_id, stop_reason, cut_off)
        prefix = cut.left
        if not prefix and self._own_pattern.match(found.close.text[cut.at :]) is None:
            prefix = self._names.get(last_id, "")
        key = found.key + _digest(cut.at, cut.closed, prefix)
        return self._suffixes.get_or_make(key, lambda: self._encode_behind(found, cut, prefix))

    def ending(
        self,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Ending:
        """How the last turn ends in the template's eyes. Arguments and errors are those of `append`."""
        found = self._continue(new_messages, history, Setting(tools, add_generation_prompt, template_kwargs))
        shared = found.close.shared
        close = found.close.text[:shared]
        following = next((token for token in found.tokens if token.start == shared), None)
        shown = next((token for token in found.alone if token.start == shared), None)
        stops = [token.id for token in found.tokens if token.end <= shared][-1:]
        if shown is not None and following is not None and not close:
            # the last turn ends with one token, an earlier one with another
            close, shared = self._names[following.id], following.end
            stops += [shown.id, following.id]
        opening = self._names[following.id] if following is not None and not close else None
        return Ending(close, [self._names[stop] for stop in stops], opening, found.close.text[shared:])

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The template's rendering of a conversation. Raises InvalidMessages."""
        return self._template.text(messages, tools, add_generation_prompt, template_kwargs)

    def own_tokens(self, text: str) -> list[str]:
        """The tokens in a text that no merge reaches across, in order."""
        return [self._names[token.id] for token in self._tokens(text)]

    def stop_id(self, *, tools: Tools | None = None, **template_kwargs: Any) -> int:
        """The token with which the template closes an assistant turn.

        Raises:
            TemplateUnsupported: it closes turns with text that is not a token of its own.
        """
        close = self._content_close(Setting(tools, False, template_kwargs))
        tokens = self._tokens(close)
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

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id."""
        backend = self._own_backend()
        return [backend.id_to_token(token) or "" for token in ids]

    def cache_info(self) -> CacheInfo:
        """Hits and misses of the suffix cache."""
        return self._suffixes.info()

    def _cut(self, found: _Found, last_id: int, stop_reason: str | int | None, cut_off: bool) -> Cut:
        shown = cut_after_stop(found.close, found.tokens, found.alone, last_id)
        if shown is not None:
            return shown
        ends_turns = last_id in self.stop_ids or last_id == stop_reason
        if cut_off or not ends_turns or last_id in found.syntax:
            return Cut(0)
        return cut_after_other_stop(found.close, found.tokens, found.alone, self._opening)

    def _continue(
        self, new: Sequence[Message], history: Sequence[Message] | None, setting: Setting
    ) -> _Found:
        """What follows the last turn, in the smallest context that decides it."""
        key = _digest(list(new), None if history is None else skeleton(history), _setting_key(setting))
        return self._found.get_or_make(key, lambda: self._find(key, new, history, setting))

    def _find(
        self, key: bytes, new: Sequence[Message], history: Sequence[Message] | None, setting: Setting
    ) -> _Found:
        content_close = self._content_close(setting)
        problem: TokenizationError | None = None
        for group in stand_ins(new, history):
            try:
                found = [self._behind_syntax(key, c, new, setting, content_close) for c in group.contexts]
            except TokenizationError as error:
                problem = error
                continue
            for context in group.where_possible:
                with suppress(TokenizationError):
                    found.append(self._behind_syntax(key, context, new, setting, content_close))
            if all(other.close == found[0].close for other in found):
                return found[0]
            problem = TemplateUnsupported(
                "the template prints details of earlier messages beside the new ones: give `history`"
            )
        assert problem is not None  # there is always a context
        raise problem

    def _behind_syntax(
        self,
        key: bytes,
        context: Sequence[Message],
        new: Sequence[Message],
        setting: Setting,
        content_close: str,
    ) -> _Found:
        found = self._rounded(tail(self._template, context, new, setting))
        tokens = self._tokens(found.text)
        at = close_start(found, tokens, content_close)
        close = found.without(at)
        syntax = frozenset(token.id for token in tokens if token.end <= at)
        return _Found(key, close, self._tokens(close.text), self._tokens(close.alone), syntax)

    @cached_property
    def _opening(self) -> frozenset[int]:
        """Tokens that open a tool result: they stand before the second of two, and behind none."""
        turn, results = two_results()
        try:
            text = tail(self._template, turn, results, Setting(None, True, {})).text
        except TokenizationError:
            return frozenset()
        first, second = text.find(FIRST_RESULT), text.find(SECOND_RESULT)
        if not 0 <= first < second:
            return frozenset()
        tokens = self._tokens(text)
        between = {token.id for token in tokens if first < token.start < second}
        return frozenset(between - {token.id for token in tokens if token.start > second})

    def _content_close(self, setting: Setting) -> str:
        """How the template closes a turn that is only text."""
        turn = [ASKING, {"role": "assistant", "content": "."}]
        found = self._rounded(tail(self._template, turn, [ASKING], setting))
        if found.shared:
            return found.text[: found.shared]
        match = self._own_pattern.match(found.text)
        return match.group() if match and self._own_pattern.match(found.alone) else ""

    def _rounded(self, found: Tail) -> Tail:
        """The tail with its shared part ending at the edge of a token."""
        for token in self._tokens(found.text):
            if token.start < found.shared < token.end:
                return Tail(found.text, token.start, found.alone)
        return found

    def _tokens(self, text: str) -> tuple[Token, ...]:
        """Tokens of their own in a text."""
        return tuple(
            Token(self._own[m.group()], m.start(), m.end()) for m in self._own_pattern.finditer(text)
        )

    def _encode_behind(self, found: _Found, cut: Cut, prefix: str) -> Continuation:
        """Encode what stands behind the cut, with the token before it as context where there is one."""
        rest = found.close.text[cut.at :]
        notes = ("turn_end_rewritten",) if cut.rewritten else ()
        if not rest:
            return Continuation((), (), notes)
        if prefix:
            first, *ids = self.encode(prefix + rest)
            if first != self._own[prefix]:
                raise TemplateUnsupported("the tokenizer merges the stop token with the text behind it")
        elif self._own_pattern.match(rest) is not None:
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

            backend = self._threads.backend = Tokenizer.from_str(self._backend_json)
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


def _setting_key(setting: Setting) -> object:
    return [
        list(setting.tools) if setting.tools else None,
        dict(setting.kwargs),
        setting.add_generation_prompt,
    ]


def _digest(*parts: object) -> bytes:
    """A key for JSON-like values; order inside objects counts, because templates print it."""
    text = json.dumps(parts, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
