"""Reads from a template's renderings how it continues after a turn, and caches the results.

Nothing here depends on a model family: the sources are the template's renderings, the tokenizer's added
tokens, which it never merges with the text around them, and the ids that end a turn of the model.
"""

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from tokenization.cache import BoundedCache
from tokenization.errors import InvalidMessages, TemplateUnsupported, TokenizationError
from tokenization.locality import Locality, Proof, prove
from tokenization.messages import Message
from tokenization.template import Template
from tokenization.turns import (
    MARK,
    PLACEHOLDER_USER,
    RenderOptions,
    Tail,
    Token,
    common_prefix_length,
    last_text,
    placeholder_context,
    render_tail,
    serialized,
    text_after_turn,
    turn_context,
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
    whole: Tail
    """Starts with the turn's own syntax."""
    tail: Tail
    """Starts with the close of the turn."""
    tokens: tuple[Token, ...]
    """The special tokens in the lead of the tail, in order."""
    closing: tuple[Token, ...]
    """Those that close the turn; empty if the template has no close."""
    close_tokens: tuple[Token, ...]
    """The added tokens up to the last one that closes the turn. Blank ones, such as a line feed that is a
    token of Gemma 3, are text like other text."""
    stop_if_last: int | None
    """The token that closes the turn where it is the last message, if that is another one (GPT-OSS)."""
    syntax_ids: frozenset[int]
    """Ids of the added tokens between the model's last text and the close, such as `</tool_call>`."""

    @property
    def syntax(self) -> str:
        """The turn's own syntax after the model's last text, such as `"}}\n</tool_call>`; mostly empty."""
        return self.whole.text[: len(self.whole.text) - len(self.tail.text)]

    def appends_as(self, other: "TurnTail") -> bool:
        """Whether the same ids are appended, whatever was sampled last."""
        mine, others = (
            (turn_tail.tail.text, turn_tail.tokens, turn_tail.close_tokens, turn_tail.closing)
            for turn_tail in (self, other)
        )
        return mine == others


@dataclass(frozen=True, slots=True)
class _ContentClose:
    """How a template closes a turn without tool calls."""

    text: str
    """The text up to the token that ends the turn; empty if the opening of the next message ends it."""
    closers: frozenset[int]
    """Ids of the special tokens in it."""


class Discovery:
    """The tails of one template with one tokenizer. Safe to use from several threads."""

    def __init__(
        self, template: Template, added_tokens: Mapping[str, int], special_ids: Set[int], stop_ids: Set[int]
    ) -> None:
        """Args:
        added_tokens: the id of each added token, by its text.
        special_ids: ids of the added tokens that are special.
        stop_ids: ids that end a turn of the model.
        """
        self.proof: Proof | None = None
        self._template = template
        self._added_ids = dict(added_tokens)
        self._added_texts = {number: text for text, number in added_tokens.items()}
        self._special_ids = frozenset(special_ids) | frozenset(stop_ids)
        self._stop_ids = frozenset(stop_ids)
        longest_first = sorted(added_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tails: BoundedCache[bytes, TurnTail] = BoundedCache(
            1024, lambda turn_tail: len(turn_tail.tail.text) <= 16_384
        )
        self._content_closes: BoundedCache[bytes, _ContentClose] = BoundedCache(256)
        self._proving = threading.Lock()

    def prove(self) -> Proof:
        """What decides the text after a turn. Takes up to `MAX_SECONDS` of CPU time the first time."""
        with self._proving:
            if self.proof is None:
                self.proof = prove(self, self._template.syntax)
            return self.proof

    def refutation(
        self, new: Sequence[Message], history: Sequence[Message], options: RenderOptions
    ) -> list[Message] | None:
        """The shortest history found after which other text is printed than the proof says.

        None if the proof holds for this history. If it does not, the whole history is rendered from now on
        where messages like the new ones follow.
        """
        proof = self.proof
        if proof is None or proof.locality(new) is Locality.HISTORY:
            return None
        in_turn, whole = self.tail_in(turn_context(history[-1]), new, options), list(history)
        if in_turn is None or self._holds(in_turn, whole, new, options):
            return None
        self.proof = proof.demoted(new, "an audit found that earlier messages decide what is printed")
        return self._shortest(in_turn, whole, new, options)

    def _shortest(
        self, tail: TurnTail, history: list[Message], new: Sequence[Message], options: RenderOptions
    ) -> list[Message]:
        """Leave out messages while a difference remains: half of the rest at first, at last each one."""
        size = len(history) // 2
        while size:
            start = 0
            while start < len(history) - 1:
                shorter = history[:start] + history[min(start + size, len(history) - 1) :]
                if self._holds(tail, shorter, new, options):
                    start += size
                else:
                    history = shorter
            size //= 2
        return history

    def starts_with_added_token(self, text: str) -> bool:
        """Whether the text starts with an added token, so that it can be encoded by itself."""
        return self._pattern.match(text) is not None

    def tokens(self, text: str, *, special: bool = False) -> tuple[Token, ...]:
        """The added tokens in a text, in order; or only the special ones."""
        found = (Token(self._added_ids[m.group()], m.start(), m.end()) for m in self._pattern.finditer(text))
        return tuple(token for token in found if not special or token.id in self._special_ids)

    def turn_tail(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> TurnTail:
        """The tail of the last turn of `history`, rendered with as little of it as is proved to be enough.

        Without a history a turn is assumed that the new messages could follow.

        Raises: as `ChatTokenizer.append`.
        """
        if history is None:
            return self._tail_after_any_turn(new, options)
        context = turn_context(history[-1])
        key = digest(list(new), context, _options_key(options))
        in_turn = None
        # the turn alone may be refused where the whole conversation is not
        with suppress(TokenizationError):
            in_turn = self._tail(key, context, new, options)
        local = self.proof is not None and self.proof.locality(new) is not Locality.HISTORY
        if in_turn is not None and local:
            return in_turn
        whole = list(history)
        history_key = digest(list(new), whole, _options_key(options))
        return self._tails.get_or_make(
            history_key,
            lambda: self._tail_after_history(history_key, whole, new, options, in_turn),
            (TokenizationError,),
        )

    def _tail_after_history(
        self,
        key: bytes,
        history: list[Message],
        new: Sequence[Message],
        options: RenderOptions,
        in_turn: TurnTail | None,
    ) -> TurnTail:
        """The tail after a whole history; `in_turn` is that after its last turn alone.

        Mostly the two are equal. One rendering shows that if it ends with the turn and then the tail.
        """
        text = self._template.text(
            [*history, *new], options.tools, options.add_generation_prompt, options.kwargs
        )
        if in_turn is not None and text.endswith(in_turn.tail.text):
            end_of_turn = in_turn.syntax or last_text(history[-1])
            if end_of_turn and text[: len(text) - len(in_turn.tail.text)].endswith(end_of_turn):
                return replace(in_turn, key=key)
        turn_tail = self._find(key, history, new, options, in_turn)
        if not text.endswith(turn_tail.tail.text):
            raise TemplateUnsupported("what the template prints after a turn depends on the text of the turn")
        return turn_tail

    def _tail_after_any_turn(self, new: Sequence[Message], options: RenderOptions) -> TurnTail:
        proof = self.prove()
        context = placeholder_context(new)
        key = digest(list(new), None, _options_key(options))
        # first, because where the template objects to the new messages as such, its own error tells more
        turn_tail = self._tail(key, context, new, options)
        if proof.locality(new) is not Locality.NEW:
            raise TemplateUnsupported(
                "what the template prints after a turn may depend on earlier messages: give `history` "
                f"({proof.reason})"
            )
        return turn_tail

    def _tail(
        self,
        key: bytes,
        context: Sequence[Message],
        new: Sequence[Message],
        options: RenderOptions,
    ) -> TurnTail:
        """As `_find`, cached; a refusal too."""
        return self._tails.get_or_make(
            key, lambda: self._find(key, context, new, options), (TokenizationError,)
        )

    def tail_in(
        self, context: Sequence[Message], new: Sequence[Message], options: RenderOptions
    ) -> TurnTail | None:
        """The tail of the last turn of a context; None where the template refuses the messages."""
        try:
            return self._find(b"", context, new, options)
        except TokenizationError:
            return None

    def continues_alike(
        self, tail: TurnTail, context: Sequence[Message], new: Sequence[Message], options: RenderOptions
    ) -> bool:
        """Whether the same is appended after a context; also where the template refuses the messages."""
        try:
            if text_after_turn(self._template, context, new, options) == tail.whole.text:
                return True
            return self._find(b"", context, new, options).appends_as(tail)
        except TokenizationError:
            return True

    def _holds(
        self, tail: TurnTail, context: Sequence[Message], new: Sequence[Message], options: RenderOptions
    ) -> bool:
        """Whether a tail is what follows in a context, with a marker in the turn and without."""
        return self.continues_alike(tail, context, new, options) and self.ends(tail, context, new, options)

    def ends(
        self, tail: TurnTail, context: Sequence[Message], new: Sequence[Message], options: RenderOptions
    ) -> bool:
        """Whether the rendering of context and new messages, without any marker, ends with the tail.

        Also where the template refuses the messages. A template may test the end of a turn's text, which a
        marker hides.
        """
        try:
            messages = [*context, *new]
            text = self._template.text(messages, options.tools, options.add_generation_prompt, options.kwargs)
        except TokenizationError:
            return True
        return text.endswith(tail.tail.text)

    def _find(
        self,
        key: bytes,
        context: Sequence[Message],
        new: Sequence[Message],
        options: RenderOptions,
        guide: TurnTail | None = None,
    ) -> TurnTail:
        """Render a context and take the turn's own syntax from its tail.

        Args:
            guide: the tail of the same turn in a smaller context.
        """
        whole = render_tail(self._template, context, new, options, guide.whole if guide else None)
        close = self._content_close(options)
        start, closers = 0, close.closers
        if whole.in_call:
            start, closers = self._close_of_call(whole, close)
        tail = whole.without_start(start)
        lead = tail.text[: tail.lead]
        tokens = self.tokens(lead, special=True)
        # the token that closes a turn may open the next message too
        end = len(close.text) if closers == close.closers and lead.startswith(close.text) else len(lead)
        closing = tuple(token for token in tokens if token.id in closers and token.end <= end)
        last = closing[-1] if closing else None
        if_last = self._token_at(tail.text_if_last, last.start) if last else None
        return TurnTail(
            key,
            whole,
            tail,
            tokens,
            closing,
            tuple(t for t in self.tokens(lead[: last.end if last else 0]) if lead[t.start : t.end].strip()),
            if_last if last and if_last != last.id and if_last in self._special_ids else None,
            frozenset(token.id for token in self.tokens(whole.text[:start])),
        )

    def _close_of_call(self, tail: Tail, close: _ContentClose) -> tuple[int, frozenset[int]]:
        """Where the syntax of a turn with tool calls ends and its close begins, and the ids of the close.

        Example: 12 in `</tool_call><|im_end|>\n`, with the content close `<|im_end|>`.
        """
        lead = tail.text[: tail.lead]
        shared = self._shared(lead, tail.text_if_last)
        start = lead[:shared].rfind(close.text) if close.text else -1
        if start < 0 and close.closers:
            start = lead.find(close.text)
        if start >= 0:
            return start, close.closers
        if not tail.text_if_last:
            raise TemplateUnsupported("the template does not show where its tool calls end")
        token_if_last = self._token_at(tail.text_if_last, shared)
        tokens = self._closing_tokens(lead, shared)
        shared = next((token.start for token in tokens if token.id in self._result_openers), shared)
        own = [token for token in tokens if token.end <= shared]
        # without a close of its own the opening of the next message ends the turn: GLM, and Gemma 4, which
        # closes the turn only if no result follows
        if not close.text or token_if_last in self._stop_ids | close.closers or not own:
            return shared, frozenset()
        first = next((token for token in own if token.id in close.closers), own[-1])
        return first.start, frozenset(token.id for token in own if token.start >= first.start)

    def _content_close(self, options: RenderOptions) -> _ContentClose:
        """How the template closes a turn without tool calls."""
        key = digest(_options_key(options))
        return self._content_closes.get_or_make(key, lambda: self._find_content_close(options))

    def _find_content_close(self, options: RenderOptions) -> _ContentClose:
        context = [*self._preamble, PLACEHOLDER_USER, {"role": "assistant", "content": "."}]
        tail = render_tail(self._template, context, [{"role": "user", "content": "qZuserZq"}], options)
        lead = tail.text[: tail.lead]
        shared = self._shared(lead, tail.text_if_last)
        closing = self._closing_tokens(lead, shared) or self._only_stop(lead, tail.text_if_last, shared)
        text = lead[: closing[-1].end] if closing else lead[:shared]
        return _ContentClose(text, frozenset(token.id for token in closing))

    def _closing_tokens(self, lead: str, shared: int) -> list[Token]:
        """The special tokens that are printed after a turn whether or not a message follows."""
        tokens = [token for token in self.tokens(lead, special=True) if token.end <= shared]
        if self._generation_prompt:
            return tokens
        # a template that always prints the generation prompt: its tokens open messages
        return [token for token in tokens if token.id not in self._openers]

    def _only_stop(self, lead: str, text_if_last: str, shared: int) -> list[Token]:
        """The token that ends a turn which messages follow, where the last turn ends differently."""
        tokens = self.tokens(lead, special=True)
        token_if_last = self._token_at(text_if_last, shared)
        if token_if_last in self._special_ids - (self._openers - self._stop_ids):
            # GPT-OSS: the last turn ends with <|return|>, earlier ones with <|end|>
            return [token for token in tokens if token.start == shared]
        # the last turn ends with nothing; the first of several tokens is no opening of the next message
        stops = [token for token in tokens[:-1][:1] if token.id in self._stop_ids - self._openers]
        return [] if text_if_last else stops

    @cached_property
    def _preamble(self) -> list[Message]:
        """A system message, if the template refuses conversations without one."""
        system: Message = {"role": "system", "content": "."}
        preambles: list[list[Message]] = [[], [system]]
        for preamble in preambles:
            with suppress(TokenizationError):
                self._template.text([*preamble, PLACEHOLDER_USER], None, True, {})
                return preamble
        return []

    @cached_property
    def _openers(self) -> frozenset[int]:
        """Ids of the special tokens that open messages: nothing was closed before the first message."""
        system = {"role": "system", "content": MARK}
        found = []
        question = {"role": "user", "content": MARK}
        for messages in ([*self._preamble, question], [system, PLACEHOLDER_USER]):
            try:
                text = self._template.text(messages, None, False, {})
            except TokenizationError:
                continue
            before, mark, after = text.partition(MARK)
            if mark:
                found.append({token.id for token in self.tokens(before, special=True)})
            if mark and not found[1:] and not self._generation_prompt:
                found[0] |= {token.id for token in self.tokens(after, special=True)[1:]}
        # a template may print a message of its own, and close it, before the first; not before each first
        return frozenset.intersection(*map(frozenset, found)) if found else frozenset()

    @cached_property
    def _result_openers(self) -> frozenset[int]:
        """Ids of the tokens that open a tool result: they stand between two results, never after both."""
        texts = ("qZfirstZq", "qZsecondZq")
        results = [
            {"role": "tool", "tool_call_id": f"call0000{i}", "content": t} for i, t in enumerate(texts)
        ]
        try:
            context = [*self._preamble, *placeholder_context(results)]
            text = self._template.text([*context, *results], None, True, {})
        except TokenizationError:
            return frozenset()
        first, second = (text.rfind(word) for word in texts)
        if not 0 <= first < second:
            return frozenset()
        tokens = self.tokens(text, special=True)
        between = {token.id for token in tokens if first < token.start < second}
        return frozenset(between - {token.id for token in tokens if token.start > second})

    @cached_property
    def _generation_prompt(self) -> str:
        """The text that `add_generation_prompt` adds; empty if it adds none."""
        try:
            question = [*self._preamble, PLACEHOLDER_USER]
            without = self._template.text(question, None, False, {})
            with_prompt = self._template.text(question, None, True, {})
        except TokenizationError:
            return ""
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _shared(self, lead: str, text_if_last: str) -> int:
        """Length of the common prefix, in characters, ending where no added token is cut in two.

        Example: of `<|im_end|>` and `<|im_start|>` the texts share `<|im_`; the result is 0.
        """
        shared = common_prefix_length(lead, text_if_last)
        for text in (lead, text_if_last):
            for token in self.tokens(text):
                if token.start < shared < token.end:
                    shared = token.start
        return shared

    def _token_at(self, text: str, position: int) -> int | None:
        match = self._pattern.match(text, position)
        return self._added_ids[match.group()] if match else None

    def ending(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> Ending:
        """How the last turn ends, for a person to read. Raises: as `turn_tail`."""
        turn_tail = self.turn_tail(new, history, options)
        tail, closing = turn_tail.tail, turn_tail.closing
        lead = tail.text[: tail.lead]
        if not closing:
            opening = turn_tail.tokens[0] if turn_tail.tokens else None
            return Ending("", [], self._added_texts[opening.id] if opening else None, tail.text)
        end = max(self._shared(lead, tail.text_if_last), closing[-1].end)
        opener = next((t for t in turn_tail.tokens if closing[-1].end <= t.start < end), None)
        end = opener.start if opener else end
        stops = [closing[-1].id]
        token_if_last = self._token_at(tail.text_if_last, closing[-1].start)
        if token_if_last is not None and token_if_last != closing[-1].id:
            stops.insert(0, token_if_last)
        return Ending(lead[:end], [self._added_texts[stop] for stop in stops], None, tail.text[end:])

    def assistant_header(self) -> str:
        """The text before an assistant's content that history and generation prompt have in common.

        Example: `<|im_start|>assistant\n`, also where the generation prompt continues with `<think>\n`.
        """
        turn, options = {"role": "assistant", "content": MARK}, RenderOptions(None, True, {})
        prompt = self._generation_prompt
        try:
            before = [*self._preamble, PLACEHOLDER_USER]
            question = self._template.text(before, None, False, options.kwargs)
            answered = self._template.text([*before, turn, PLACEHOLDER_USER], None, True, options.kwargs)
        except TokenizationError:
            return ""
        if not prompt or MARK not in answered:
            return ""
        end = common_prefix_length(question + prompt, answered[: answered.find(MARK)])
        return (question + prompt)[len(question) : end]

    def stop_of_content(self, options: RenderOptions) -> int | None:
        """The id of the token that closes a turn without tool calls; None if there is none."""
        tokens = self.tokens(self._content_close(options).text, special=True)
        return tokens[-1].id if tokens else None


def _options_key(options: RenderOptions) -> object:
    return [
        list(options.tools) if options.tools else None,
        dict(options.kwargs),
        options.add_generation_prompt,
    ]


def digest(*parts: object) -> bytes:
    """A 16-byte cache key for JSON-like values. The order of keys in objects counts: templates print it.

    Raises:
        InvalidMessages: a value is nested too deep.
    """
    try:
        return hashlib.blake2b(serialized(parts), digest_size=16).digest()
    except RecursionError as error:
        raise InvalidMessages("the messages, tools or template arguments are nested too deep") from error
