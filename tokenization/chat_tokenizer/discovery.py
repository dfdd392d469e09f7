"""Finds the text that a template prints after a turn, from its renderings, and caches the results.

Nothing here depends on a model family: the sources are the template's renderings, the tokenizer's added
tokens, which it never merges with the text around them, and the ids that end a turn of the model.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from chat_tokenizer.added_tokens import AddedTokens, Token
from chat_tokenizer.cache import BoundedCache, digest
from chat_tokenizer.closes import Closes, ContentClose
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported, TokenizationError
from chat_tokenizer.messages import Message
from chat_tokenizer.new_texts import has_text, last_text
from chat_tokenizer.proof import Locality, Proof, answers_calls, prove, tried_values, with_thinking
from chat_tokenizer.renderer import Append, Renderer, RenderOptions
from chat_tokenizer.turns import (
    Marked,
    Tail,
    placeholder_context,
    render_marked,
    render_tail,
    turn_context,
)

_MAX_SECONDS_SHORTENING = 2.0
_LATER_ROLES = frozenset({"user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class TurnTail:
    """The tail of a turn without the turn's own syntax. It does not depend on the ids before it."""

    key: bytes
    """The cache key: a digest of all that the tail depends on."""
    whole: Tail
    """The tail from the turn's own syntax on."""
    tail: Tail
    """The tail from the close of the turn on."""
    tokens: tuple[Token, ...]
    """The special tokens in the lead of the tail, in order."""
    closing: tuple[Token, ...]
    """The tokens that close the turn; empty if the template has no close."""
    close_tokens: tuple[Token, ...]
    """The added tokens up to the last one that closes the turn. Blank ones, such as a line feed that is a
    token of Gemma 3, are text like other text."""
    stop_if_last: Token | None
    """The token that closes the turn where it is the last message, if that is another one (GPT-OSS), or if
    nothing else closes it. The text before it is the same in both cases."""
    unclear_stop: Token | None
    """A stop token after the close, or in its place, that may close the turn or open the next message."""
    own_stop: Token | None
    """The last of `closing` if one of them ends turns of the model (in Gemma 4's calls none does); without a
    close, the stop token that opens the next message (GLM)."""
    unclear_ids: frozenset[int]
    """Ids that do not tell how much of the close was sampled: those in `close_tokens` that occur in it more
    than once, in the turn's own syntax, or at the end of the generation prompt too (Kimi K3); and the first
    added token of the lead, if it is not known to close the turn."""
    syntax_ids: frozenset[int]
    """Ids of the added tokens between the model's last text and the close, such as `</tool_call>`."""
    after_stop: bool = False
    """Whether only the text after its stop token is that of the turn, whose close is not shown."""

    @property
    def syntax(self) -> str:
        """The turn's own syntax after the model's last text, such as `"}}\n</tool_call>`; mostly empty."""
        return self.whole.text[: len(self.whole.text) - len(self.tail.text)]

    @property
    def blanks(self) -> str:
        """The white space after a turn's calls; empty for turns without calls."""
        text = self.tail.text
        return text[: len(text) - len(text.lstrip())] if self.whole.in_call else ""

    def appends_as(self, other: "TurnTail") -> bool:
        """Whether the same ids are appended after every sampled id."""
        mine, others = (
            (each.tail.text, each.blanks, each.tokens, each.close_tokens, each.closing, each.after_stop)
            for each in (self, other)
        )
        return mine == others

    def continues_as(self, other: "TurnTail") -> bool:
        """Whether the same ids are appended after a stop token that ended the turn."""
        mine, others = self.own_stop, other.own_stop
        if mine is None or others is None or self.unclear_stop or other.unclear_stop:
            return False
        return mine.id == others.id and self.tail.text[mine.end :] == other.tail.text[others.end :]


class Discovery:
    """The tails of one template with one tokenizer. Safe to use from several threads."""

    def __init__(self, template: Renderer, added: AddedTokens) -> None:
        self.proof: Proof | None = None
        self.closes = Closes(template, added)
        self._template = template
        self._added = added
        self._tails: BoundedCache[bytes, TurnTail] = BoundedCache(
            1024, lambda turn_tail: len(turn_tail.tail.text) <= 16_384
        )
        self._proving = threading.Lock()
        self._changing = threading.Lock()

    def prove(self) -> Proof:
        """Prove which messages determine the text after a turn. The first call takes up to `MAX_SECONDS`."""
        with self._proving:
            return self.proof or self.adopt(prove(self, self._template.syntax))

    def adopt(self, proof: Proof) -> Proof:
        """Adopt a proof from another process and keep the refutations of this one. Returns the result."""
        with self._changing:
            self.proof = proof if self.proof is None else self.proof.and_refuted_in(proof)
            return self.proof

    def is_local(self, new: Sequence[Message], options: RenderOptions) -> bool:
        """Whether it is proved that the text after a turn depends on no earlier message."""
        proof = self.proof
        if proof is None or proof.locality(new) is Locality.HISTORY or not self._tried(options):
            return False
        # a system message may be merged into the first one
        return self._template.syntax.complete or all(message.get("role") in _LATER_ROLES for message in new)

    def _answered(self, append: Append) -> bool:
        """Whether the call of each new result is known: it may be one of the turn, or of a new message.

        Without a source, a renderer may look for the call of any other result in earlier messages.
        """
        return self._template.syntax.complete or answers_calls(append.turn, append.new)

    def _tried(self, options: RenderOptions) -> bool:
        """Whether the proof tested these options: at most one argument that is read, and its value.

        It tested none without a generation prompt.
        """
        syntax = self._template.syntax
        read = {
            name: value
            for name, value in options.kwargs.items()
            if name in syntax.kwargs or not syntax.complete
        }
        effort = {name: value for name, value in read.items() if name == "reasoning_effort"}
        if effort and not syntax.complete and read == with_thinking(effort):
            read = effort
        if "documents" in options.kwargs or len(read) > 1 or not read.keys() <= syntax.kwargs.keys():
            return False
        if not options.add_generation_prompt and (read or not syntax.complete):
            return False
        return all(_is_in(value, tried_values(syntax, name)) for name, value in read.items())

    def refutation(
        self, new: Sequence[Message], history: Sequence[Message], options: RenderOptions
    ) -> list[Message] | None:
        """The shortest history found that contradicts the proof.

        None if the proof holds for this history. If it does not, the whole history is rendered from now on
        for messages like the new ones.
        """
        proof, append = self.proof, Append(history, new, options)
        if proof is None or not self.is_local(new, options) or not self._answered(append):
            return None
        in_turn = self.tail_in(append.after(turn_context(append.turn)))
        if in_turn is None or self._holds(in_turn, append):
            return None
        self.adopt(proof.demoted(new, "an audit found that earlier messages decide what is printed"))
        return self._shortest(in_turn, append)

    def _shortest(self, tail: TurnTail, append: Append) -> list[Message]:
        """Remove messages while a difference remains: first half of the rest, at last single messages.

        Stops after `_MAX_SECONDS_SHORTENING`.
        """
        history = list(append.context)
        size, until = len(history) // 2, time.monotonic() + _MAX_SECONDS_SHORTENING
        while size:
            start = 0
            while start < len(history) - 1 and time.monotonic() < until:
                shorter = history[:start] + history[min(start + size, len(history) - 1) :]
                if self._holds(tail, append.after(shorter)):
                    start += size
                else:
                    history = shorter
            size //= 2
        return history

    def turn_tail(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> TurnTail:
        """The tail of the last turn of `history`, from the shortest context that is proved to suffice.

        Without a history, it is the tail of a placeholder turn that the new messages could follow.

        Raises: as `ChatTokenizer.append`.
        """
        if history is None:
            return self._tail_after_any_turn(new, options)
        alone = Append(turn_context(history[-1]), new, options)
        in_turn = None
        # a template may refuse the turn alone and accept the whole conversation
        with suppress(TokenizationError):
            in_turn = self._cached(alone, lambda key: self._find(key, alone)[0])
        turn = history[-1]
        # a marker makes a turn without text another one, which only the whole rendering shows
        written = bool(turn.get("tool_calls")) or has_text(turn.get("content"))
        if in_turn is not None and written and self.is_local(new, options) and self._answered(alone):
            return in_turn
        append = alone.after(list(history))
        return self._cached(append, lambda key: self._after_history(key, append, in_turn))

    def _cached(self, append: Append, find: Callable[[bytes], TurnTail]) -> TurnTail:
        """The tail that `find` returns for a key; tails and refusals are cached."""
        key = digest(list(append.new), append.context, append.options.key(), self._template.now())
        return self._tails.get_or_make(key, lambda: find(key), (TokenizationError,))

    def _after_history(self, key: bytes, append: Append, in_turn: TurnTail | None) -> TurnTail:
        """The tail after a whole history; `in_turn` is the tail after its last turn alone.

        Mostly the two are equal. One rendering shows that if the turn's last text occurs in it once.
        """
        text = self._template.text([*append.context, *append.new], append.options)
        start = _end_of_turn(text, append.turn, in_turn) if in_turn is not None else None
        if in_turn is not None and start is not None and text[start:] == in_turn.tail.text:
            return replace(in_turn, key=key)
        turn_tail, marked = self._find(key, append, in_turn)
        if not marked.agrees_with(text, turn_tail.tail.text):
            # the marker may stand for a text that the turn lacks: then only its stop token and the rest agree
            stop = turn_tail.own_stop
            rest = turn_tail.tail.text[stop.start :] if stop else ""
            if rest and text.endswith(rest) and marked.before.startswith(text.removesuffix(rest)):
                return replace(turn_tail, after_stop=True)
            raise TemplateUnsupported("what the template prints after a turn depends on the text of the turn")
        return turn_tail

    def _tail_after_any_turn(self, new: Sequence[Message], options: RenderOptions) -> TurnTail:
        proof = self.prove()
        append = Append(placeholder_context(new), new, options)
        # first, because if the template refuses the new messages themselves, its own error is more useful
        turn_tail = self._cached(append, lambda key: self._find(key, append)[0])
        locality = proof.locality(new)
        if locality not in (Locality.NEW, Locality.NEW_AFTER_STOP) or not self._tried(options):
            raise TemplateUnsupported(
                "what the template prints after a turn may depend on earlier messages: give `history` "
                f"({proof.reason})"
            )
        return replace(turn_tail, after_stop=turn_tail.after_stop or locality is Locality.NEW_AFTER_STOP)

    def tail_in(self, append: Append) -> TurnTail | None:
        """The tail of the turn; None if the template refuses the messages."""
        try:
            return self._find(b"", append)[0]
        except TokenizationError:
            return None

    def continues_alike(self, tail: TurnTail, append: Append) -> bool:
        """Whether the same ids are appended as after a tail, or the template refuses the messages."""
        try:
            if render_marked(self._template, append).text == tail.whole.text:
                return True
            return self._find(b"", append)[0].appends_as(tail)
        except InvalidMessages:
            return True
        except TokenizationError:
            return False

    def _holds(self, tail: TurnTail, append: Append) -> bool:
        """Whether a tail is printed after a context, both with a marker in the turn and without."""
        return self.continues_alike(tail, append) and self.ends(tail, append)

    def ends(self, tail: TurnTail, append: Append) -> bool:
        """Whether the rendering of context and new messages, without any marker, ends with turn and tail.

        Also True if the template refuses the messages. Renders without a marker, because a template may test
        the turn's text, which a marker changes.
        """
        try:
            text = self._template.text([*append.context, *append.new], append.options)
            marked = render_marked(self._template, append)
        except TokenizationError:
            return True
        return text.endswith(tail.tail.text) and marked.agrees_with(text, tail.tail.text)

    def _find(self, key: bytes, append: Append, guide: TurnTail | None = None) -> tuple[TurnTail, Marked]:
        """Render, and take the turn's own syntax from the tail; also returns that rendering.

        Args:
            guide: the tail of the same turn in a smaller context.
        """
        whole, marked = render_tail(self._template, append, guide.whole if guide else None)
        return self._without_syntax(key, whole, append.options), marked

    def _without_syntax(self, key: bytes, whole: Tail, options: RenderOptions) -> TurnTail:
        """Take the turn's own syntax from a tail, and find the tokens that close the turn."""
        close = self.closes.of_content(options)
        # the token that closes a turn may open the next message too: only the close is searched
        start, end, closers, shown = 0, len(close.text), close.closers, True
        if not whole.text[: whole.lead].startswith(close.text):
            found = self._added.find(whole.text[: whole.lead])
            end = next((token.end for token in found if token.id == close.stop), whole.lead)
        if whole.in_call:
            start, end, closers, shown = self.closes.of_call(whole, close)
        tail = whole.without_start(start)
        lead = tail.text[: tail.lead]
        tokens = self._added.find(lead, special=True)
        closing = tuple(token for token in tokens if token.id in closers and token.end <= end - start)
        closing, unclear_stop = self._with_later_stops(tokens, closing, close, whole.in_call)
        last = closing[-1] if closing else None
        close_text = lead[: last.end if last else 0]
        found = self._added.find(close_text)
        close_tokens = tuple(token for token in found if close_text[token.start : token.end].strip())
        syntax = frozenset(token.id for token in self._added.find(whole.text[:start]))
        stops = self._added.stop_ids
        own_stop = last if any(token.id in stops for token in closing) else None
        if not closing:
            own_stop = next((token for token in tokens[:1] if token.id in stops), None)
        return TurnTail(
            key,
            whole,
            tail,
            tokens,
            closing,
            close_tokens,
            self._stop_if_last(tail, last),
            unclear_stop,
            own_stop,
            self._unclear_ids(tail, close_tokens, syntax),
            syntax,
            not shown,
        )

    def _unclear_ids(
        self, tail: Tail, close_tokens: tuple[Token, ...], syntax: frozenset[int]
    ) -> frozenset[int]:
        """See `TurnTail.unclear_ids`."""
        # the tail may end with the prompt of the next turn, which the prompt of this turn resembles
        elsewhere = syntax | {self.closes.last_of_prompt, self._added.id_at_end(tail.text)}
        times = Counter(token.id for token in close_tokens)
        unclear = {token for token, count in times.items() if count > 1 or token in elsewhere}
        lead = tail.text[: tail.lead]
        first = self._added.id_at(lead, len(lead) - len(lead.lstrip()))
        return frozenset(unclear if first is None or first in times else unclear | {first})

    def _stop_if_last(self, tail: Tail, last: Token | None) -> Token | None:
        """See `TurnTail.stop_if_last`; `last` is the last token that closes it where messages follow."""
        lead, if_last = tail.text[: tail.lead], tail.text_if_last
        start = last.start if last else self._added.shared(lead, if_last)
        stop = self._added.id_at(if_last, start)
        stops = self._added.special_ids - {last.id} if last else self._added.stop_ids
        return Token(stop, start, start + len(self._added.text(stop))) if stop in stops else None

    def _with_later_stops(
        self, tokens: tuple[Token, ...], closing: tuple[Token, ...], close: ContentClose, in_call: bool
    ) -> tuple[tuple[Token, ...], Token | None]:
        """The tokens that close a turn, up to the last stop token that is shown to; and `unclear_stop`.

        Example: `<|end|></s>` of `<|end|></s>\n<|start|>user`, where the last turn lacks the `</s>`.
        """
        end = closing[-1].end if closing else 0
        stops = (self._added.stop_ids | close.closers) - self.closes.result_openers
        later = [token for token in tokens if token.start >= end]
        later_stop = next((token for token in later if token.id in stops), None)
        # without its own close, a turn may be closed with another token than others
        if later_stop is None or (close.closers and not closing):
            return closing, later_stop
        for index, token in enumerate(tokens):
            if token.start < end:
                continue
            closes = self.closes.closes_turn(token.id, in_call)
            if closes is None:
                return closing, token
            if not closes:
                break
            if token.id in stops:
                closing = tokens[: index + 1]
        return closing, None


def _end_of_turn(text: str, turn: Message, turn_tail: TurnTail) -> int | None:
    """Where the last turn ends in a rendering; None if its last text and close are not found there.

    It is the first position where they are found. If an earlier turn is equal, the text after it is longer
    than the tail, and the caller renders with a marker.
    """
    end = last_text(turn).strip()
    closing = turn_tail.closing
    close = turn_tail.tail.text[: closing[-1].end if closing else 0]
    start = text.find(end + turn_tail.syntax + close)
    return start + len(end) + len(turn_tail.syntax) if end and start >= 0 else None


def _is_in(value: object, values: list[object]) -> bool:
    """Whether a value is one of these; 1 is not True."""
    return any(type(value) is type(other) and value == other for other in values)
