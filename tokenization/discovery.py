"""Finds out how a template goes on after a turn, and remembers it.

Nothing is known of model families: all that is used is the template's renderings and the tokens that the
tokenizer keeps whole.
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
    ASKING,
    FIRST_RESULT,
    MARK,
    SECOND_RESULT,
    Setting,
    Tail,
    Token,
    close_start,
    shared_length,
    skeleton,
    stand_ins,
    tail,
    two_results,
)


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
class Found:
    """What is known of one continuation, whatever the ids before it."""

    key: bytes
    close: Tail
    """What stands behind the turn's own syntax."""
    tokens: tuple[Token, ...]
    alone: tuple[Token, ...]
    syntax: frozenset[int]
    """Tokens of the syntax between the last thing written and the close."""


class Discovery:
    """What is known of one template with one tokenizer. Safe to use from several threads."""

    def __init__(self, template: Template, own_tokens: Mapping[str, int]) -> None:
        """`own_tokens` are the tokens that no merge reaches across, with their ids."""
        self._template = template
        self._own = own_tokens
        self._names = {number: content for content, number in own_tokens.items()}
        longest_first = sorted(own_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._found: BoundedCache[bytes, Found] = BoundedCache(
            1024, lambda found: len(found.close.text) <= 16_384
        )
        self._content_closes: BoundedCache[bytes, str] = BoundedCache(256)
        # shapes of new messages for which earlier messages were seen not to matter: seen once is enough
        self._settled: BoundedCache[bytes, bool] = BoundedCache(4096)

    def starts_with_own_token(self, text: str) -> bool:
        """Whether the text begins at the edge of a token."""
        return self._pattern.match(text) is not None

    def tokens(self, text: str) -> tuple[Token, ...]:
        """Tokens of their own in a text."""
        return tuple(Token(self._own[m.group()], m.start(), m.end()) for m in self._pattern.finditer(text))

    def follow(self, new: Sequence[Message], history: Sequence[Message] | None, setting: Setting) -> Found:
        """What follows the last turn, found in the smallest context that decides it.

        Raises: as `ChatTokenizer.append`.
        """
        key = digest(list(new), None if history is None else skeleton(history), _setting_key(setting))
        try:
            return self._found.get_or_make(key, lambda: self._find(key, new, history, setting))
        except TokenizationError:
            if history is None:
                raise
        # the shape of the history does not decide it: the history itself does
        whole = digest(list(new), list(history), _setting_key(setting))
        close = self.content_close(setting)
        return self._found.get_or_make(
            whole, lambda: self._behind_syntax(whole, history, new, setting, close)
        )

    def ending(self, new: Sequence[Message], history: Sequence[Message] | None, setting: Setting) -> Ending:
        """How the last turn ends, for a person to read. Raises: as `follow`."""
        found = self.follow(new, history, setting)
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

    def assistant_header(self) -> str:
        """What stands before an assistant's text in the history and in the generation prompt alike."""
        turn, setting = {"role": "assistant", "content": MARK}, Setting(None, True, {})
        try:
            asked = self._template.text([ASKING], None, False, setting.kwargs)
            asking = self._template.text([ASKING], None, True, setting.kwargs)
            told = self._template.text([ASKING, turn, ASKING], None, True, setting.kwargs)
        except TokenizationError:
            return ""
        if not asking.startswith(asked) or MARK not in told:
            return ""
        return asking[len(asked) : shared_length(asking, told[: told.find(MARK)])]

    def content_close(self, setting: Setting) -> str:
        """How the template closes a turn that is only text."""
        key = digest(_setting_key(setting))
        return self._content_closes.get_or_make(key, lambda: self._find_content_close(setting))

    def _find_content_close(self, setting: Setting) -> str:
        turn = [ASKING, {"role": "assistant", "content": "."}]
        found = self._rounded(tail(self._template, turn, [ASKING], setting))
        if found.shared:
            return found.text[: found.shared]
        match = self._pattern.match(found.text)
        return match.group() if match and self._pattern.match(found.alone) else ""

    @cached_property
    def opening(self) -> frozenset[int]:
        """Tokens that open a tool result: they stand before the second of two, and behind none."""
        turn, results = two_results()
        try:
            text = tail(self._template, turn, results, Setting(None, True, {})).text
        except TokenizationError:
            return frozenset()
        first, second = text.find(FIRST_RESULT), text.find(SECOND_RESULT)
        if not 0 <= first < second:
            return frozenset()
        tokens = self.tokens(text)
        between = {token.id for token in tokens if first < token.start < second}
        return frozenset(between - {token.id for token in tokens if token.start > second})

    def _find(
        self, key: bytes, new: Sequence[Message], history: Sequence[Message] | None, setting: Setting
    ) -> Found:
        content_close = self.content_close(setting)
        shape = digest(_shape(new), None if history is None else skeleton(history), _setting_key(setting))
        problem: TokenizationError | None = None
        for number, group in enumerate(stand_ins(new, history)):
            longer = [] if self._settled.get(shape + bytes([number])) else group.longer
            try:
                found = [self._behind_syntax(key, c, new, setting, content_close) for c in group.contexts]
            except TokenizationError as error:
                problem = error
                continue
            for context in [*group.where_possible, *longer]:
                with suppress(TokenizationError):
                    found.append(self._behind_syntax(key, context, new, setting, content_close))
            if all(other.close == found[0].close for other in found):
                self._settled.put(shape + bytes([number]), True)
                return found[0]
            problem = TemplateUnsupported(
                "the template prints details of earlier messages beside the new ones: give `history`"
            )
        assert problem is not None  # there is always a group
        raise problem

    def _behind_syntax(
        self,
        key: bytes,
        context: Sequence[Message],
        new: Sequence[Message],
        setting: Setting,
        content_close: str,
    ) -> Found:
        found = self._rounded(tail(self._template, context, new, setting))
        tokens = self.tokens(found.text)
        at = close_start(found, tokens, content_close)
        close = found.without(at)
        syntax = frozenset(token.id for token in tokens if token.end <= at)
        return Found(key, close, self.tokens(close.text), self.tokens(close.alone), syntax)

    def _rounded(self, found: Tail) -> Tail:
        """The tail with its shared part ending at the edge of a token."""
        for token in self.tokens(found.text):
            if token.start < found.shared < token.end:
                return Tail(found.text, token.start, found.alone)
        return found


def _shape(new: Sequence[Message]) -> list[object]:
    return [[message.get("role"), sorted(message)] for message in new]


def _setting_key(setting: Setting) -> object:
    return [
        list(setting.tools) if setting.tools else None,
        dict(setting.kwargs),
        setting.add_generation_prompt,
    ]


def digest(*parts: object) -> bytes:
    """A key for JSON-like values; order inside objects counts, because templates print it."""
    text = json.dumps(parts, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
