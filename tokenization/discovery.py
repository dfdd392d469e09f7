"""Reads from a template's renderings how it continues after a turn, and caches the results.

Nothing here depends on a model family: the only sources are the template's renderings and the tokenizer's
added tokens, which it never merges with the text around them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from tokenization.cache import BoundedCache
from tokenization.errors import TemplateUnsupported, TokenizationError
from tokenization.messages import Message
from tokenization.template import Template
from tokenization.turns import (
    FIRST_RESULT,
    MARK,
    PLACEHOLDER_USER,
    SECOND_RESULT,
    RenderOptions,
    Tail,
    Token,
    close_start,
    common_prefix_length,
    placeholder_contexts,
    render_tail,
    skeleton,
    two_tool_results,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a template ends an assistant turn and continues after it."""

    close: str
    """The text that closes the turn; empty where the opening of the next message ends it."""
    stops: list[str]
    """The token that ends the turn, and the token that replaces it when messages follow, if that differs."""
    opening: str | None
    """The token that follows a turn without a close; None if the turn has a close."""
    after_close: str
    """All text after the close: separators, new messages, generation prompt."""


@dataclass(frozen=True, slots=True)
class TurnTail:
    """The tail of a turn without the turn's own syntax. It does not depend on the ids before it."""

    key: bytes
    """The cache key: a digest of all that the tail depends on."""
    tail: Tail
    """Starts with the close of the turn."""
    tokens: tuple[Token, ...]
    """The added tokens in `tail.text`, in order."""
    tokens_if_last: tuple[Token, ...]
    """The added tokens in `tail.text_if_last`, in order."""
    syntax_ids: frozenset[int]
    """Ids of the added tokens between the model's last text and the close, such as `</tool_call>`."""


class Discovery:
    """The tails of one template with one tokenizer. Safe to use from several threads."""

    def __init__(self, template: Template, added_tokens: Mapping[str, int]) -> None:
        """`added_tokens` maps the text of each added token to its id."""
        self._template = template
        self._added_ids = added_tokens
        self._added_texts = {number: content for content, number in added_tokens.items()}
        # longest first: of two tokens that start at one place the tokenizer takes the longer
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tails: BoundedCache[bytes, TurnTail] = BoundedCache(
            1024, lambda turn_tail: len(turn_tail.tail.text) <= 16_384
        )
        self._content_closes: BoundedCache[bytes, str] = BoundedCache(256)
        # shapes of new messages whose tail did not change after more messages: checked once per shape,
        # because each check costs three more renderings
        self._checked_shapes: BoundedCache[bytes, bool] = BoundedCache(4096)

    def starts_with_added_token(self, text: str) -> bool:
        """Whether the text starts with an added token, so that it can be encoded by itself."""
        return self._pattern.match(text) is not None

    def tokens(self, text: str) -> tuple[Token, ...]:
        """The added tokens in a text, in order."""
        return tuple(
            Token(self._added_ids[m.group()], m.start(), m.end()) for m in self._pattern.finditer(text)
        )

    def turn_tail(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> TurnTail:
        """The tail of the last turn, rendered with as little of the history as the template allows.

        Raises: as `ChatTokenizer.append`.
        """
        key = digest(list(new), None if history is None else skeleton(history), _options_key(options))
        try:
            return self._tails.get_or_make(
                key, lambda: self._find_tail(key, new, history, options), (TokenizationError,)
            )
        except TokenizationError:
            if history is None:
                raise
        # the template needs more than the skeleton of the history: render all of it
        history_key = digest(list(new), list(history), _options_key(options))
        close = self.content_close(options)
        return self._tails.get_or_make(
            history_key,
            lambda: self._tail_after_syntax(history_key, history, new, options, close),
            (TokenizationError,),
        )

    def ending(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> Ending:
        """How the last turn ends, for a person to read. Raises: as `turn_tail`."""
        turn_tail = self.turn_tail(new, history, options)
        shared = turn_tail.tail.shared
        close = turn_tail.tail.text[:shared]
        token_if_followed = next((token for token in turn_tail.tokens if token.start == shared), None)
        token_if_last = next((token for token in turn_tail.tokens_if_last if token.start == shared), None)
        stops = [token.id for token in turn_tail.tokens if token.end <= shared][-1:]
        if token_if_last is not None and token_if_followed is not None and not close:
            # the last turn ends with one token, an earlier turn with another
            close, shared = self._added_texts[token_if_followed.id], token_if_followed.end
            stops += [token_if_last.id, token_if_followed.id]
        opening = (
            self._added_texts[token_if_followed.id] if token_if_followed is not None and not close else None
        )
        stop_texts = [self._added_texts[stop] for stop in stops]
        return Ending(close, stop_texts, opening, turn_tail.tail.text[shared:])

    def assistant_header(self) -> str:
        """The text before an assistant's content that history and generation prompt have in common.

        Example: `<|im_start|>assistant\\n`, also where the generation prompt continues with `<think>\\n`.
        """
        turn, options = {"role": "assistant", "content": MARK}, RenderOptions(None, True, {})
        try:
            question = self._template.text([PLACEHOLDER_USER], None, False, options.kwargs)
            with_prompt = self._template.text([PLACEHOLDER_USER], None, True, options.kwargs)
            answered = self._template.text(
                [PLACEHOLDER_USER, turn, PLACEHOLDER_USER], None, True, options.kwargs
            )
        except TokenizationError:
            return ""
        if not with_prompt.startswith(question) or MARK not in answered:
            return ""
        end = common_prefix_length(with_prompt, answered[: answered.find(MARK)])
        return with_prompt[len(question) : end]

    def content_close(self, options: RenderOptions) -> str:
        """The text with which the template closes a turn without tool calls; empty if it has no close."""
        key = digest(_options_key(options))
        return self._content_closes.get_or_make(
            key, lambda: self._find_content_close(options), (TokenizationError,)
        )

    def _find_content_close(self, options: RenderOptions) -> str:
        context = [PLACEHOLDER_USER, {"role": "assistant", "content": "."}]
        tail = self._align_shared(render_tail(self._template, context, [PLACEHOLDER_USER], options))
        if tail.shared:
            return tail.text[: tail.shared]
        match = self._pattern.match(tail.text)
        return match.group() if match and self._pattern.match(tail.text_if_last) else ""

    @cached_property
    def opening(self) -> frozenset[int]:
        """Ids of the tokens that open a tool result: they stand between two results, never after both."""
        context, results = two_tool_results()
        try:
            text = render_tail(self._template, context, results, RenderOptions(None, True, {})).text
        except TokenizationError:
            return frozenset()
        first, second = text.find(FIRST_RESULT), text.find(SECOND_RESULT)
        if not 0 <= first < second:
            return frozenset()
        tokens = self.tokens(text)
        between = {token.id for token in tokens if first < token.start < second}
        return frozenset(between - {token.id for token in tokens if token.start > second})

    def _find_tail(
        self,
        key: bytes,
        new: Sequence[Message],
        history: Sequence[Message] | None,
        options: RenderOptions,
    ) -> TurnTail:
        """The tail in the first group of placeholder contexts that all lead to the same one."""
        content_close = self.content_close(options)
        shape = digest(_shape(new), None if history is None else skeleton(history), _options_key(options))
        problem: TokenizationError | None = None
        for number, group in enumerate(placeholder_contexts(new, history)):
            group_key = shape + bytes([number])
            longer = [] if self._checked_shapes.get(group_key) else group.longer
            try:
                turn_tails = [
                    self._tail_after_syntax(key, context, new, options, content_close)
                    for context in group.contexts
                ]
            except TokenizationError as error:
                problem = error
                continue
            for context in [*group.optional, *longer]:
                # a template may refuse these, which proves nothing
                with suppress(TokenizationError):
                    turn_tails.append(self._tail_after_syntax(key, context, new, options, content_close))
            if all(turn_tail.tail == turn_tails[0].tail for turn_tail in turn_tails):
                self._checked_shapes.put(group_key, True)
                return turn_tails[0]
            problem = TemplateUnsupported(
                "the template prints details of earlier messages next to the new ones: give `history`"
            )
        assert problem is not None  # there is at least one group
        raise problem

    def _tail_after_syntax(
        self,
        key: bytes,
        context: Sequence[Message],
        new: Sequence[Message],
        options: RenderOptions,
        content_close: str,
    ) -> TurnTail:
        tail = self._align_shared(render_tail(self._template, context, new, options))
        tokens = self.tokens(tail.text)
        start = close_start(tail, tokens, content_close)
        closing = tail.without_start(start)
        syntax_ids = frozenset(token.id for token in tokens if token.end <= start)
        return TurnTail(
            key, closing, self.tokens(closing.text), self.tokens(closing.text_if_last), syntax_ids
        )

    def _align_shared(self, tail: Tail) -> Tail:
        """The tail with a shared part that ends where no added token is cut in two.

        Example: of `<|im_end|>` and `<|im_start|>` the texts share `<|im_`; the shared part ends before it.
        """
        for token in self.tokens(tail.text):
            if token.start < tail.shared < token.end:
                return Tail(tail.text, token.start, tail.text_if_last)
        return tail


def _shape(new: Sequence[Message]) -> list[object]:
    return [[message.get("role"), sorted(message)] for message in new]


def _options_key(options: RenderOptions) -> object:
    return [
        list(options.tools) if options.tools else None,
        dict(options.kwargs),
        options.add_generation_prompt,
    ]


def digest(*parts: object) -> bytes:
    """A 16-byte cache key for JSON-like values. The order of keys in objects counts: templates print it."""
    text = json.dumps(parts, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
