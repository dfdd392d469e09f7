"""Finds the text that a template prints after a turn, from its renderings.

Nothing here depends on a model family: the sources are the template's renderings, the tokenizer's added
tokens, which it never merges with the text around them, and the ids that end a turn of the model.
"""

from collections import Counter
from dataclasses import dataclass, replace

from chat_tokenizer.added_tokens import AddedTokens, Token
from chat_tokenizer.closes import Closes, ContentClose
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported, TokenizationError
from chat_tokenizer.new_texts import check_new_texts
from chat_tokenizer.renderer import Append, Renderer
from chat_tokenizer.turns import Marked, Tail, render_tail, tail_shown


@dataclass(frozen=True, slots=True)
class TurnTail:
    """The tail of a turn without the turn's own syntax. It does not depend on the ids before it."""

    whole: Tail
    """The tail from the turn's own syntax on."""
    text: str
    """The text from the close of the turn on."""
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
        return self.whole.text[: len(self.whole.text) - len(self.text)]

    @property
    def blanks(self) -> str:
        """The white space after a turn's calls; empty for turns without calls."""
        return self.text[: len(self.text) - len(self.text.lstrip())] if self.whole.in_call else ""

    def appends_as(self, other: "TurnTail") -> bool:
        """Whether the same ids are appended after every sampled id."""
        mine, others = (
            (each.text, each.blanks, each.tokens, each.close_tokens, each.closing, each.after_stop)
            for each in (self, other)
        )
        return mine == others

    def continues_as(self, other: "TurnTail") -> bool:
        """Whether the same ids are appended after a stop token that ended the turn."""
        mine, others = self.own_stop, other.own_stop
        if mine is None or others is None or self.unclear_stop or other.unclear_stop:
            return False
        return mine.id == others.id and self.text[mine.end :] == other.text[others.end :]


class Tails:
    """The tails of one template with one tokenizer. Safe to use from several threads."""

    def __init__(self, template: Renderer, added: AddedTokens) -> None:
        self.closes = Closes(template, added)
        self._template = template
        self._added = added

    def after_history(self, append: Append, in_turn: TurnTail | None) -> TurnTail:
        """The tail after a whole history; `in_turn` is the tail after its last turn alone, if that has one.

        Mostly the two differ in numbers at most, such as that of a message. One rendering shows that.
        """
        text = self._template.text([*append.context, *append.new], append.options)
        if in_turn is not None:
            close = in_turn.syntax + in_turn.text[: in_turn.closing[-1].end if in_turn.closing else 0]
            if (whole := tail_shown(text, append.context, in_turn.whole, close)) is not None:
                return in_turn if whole == in_turn.whole else self._without_syntax(whole, append)
        turn_tail, marked = self.find(append, in_turn)
        if not marked.agrees_with(text, turn_tail.text):
            # the marker may stand for a text that the turn lacks: then only its stop token and the rest agree
            stop = turn_tail.own_stop
            rest = turn_tail.text[stop.start :] if stop else ""
            if rest and text.endswith(rest) and marked.before.startswith(text.removesuffix(rest)):
                return replace(turn_tail, after_stop=True)
            raise TemplateUnsupported("what the template prints after a turn depends on the text of the turn")
        return turn_tail

    def tail_in(self, append: Append) -> TurnTail | None:
        """The tail of the turn; None if the template refuses the messages."""
        try:
            return self.find(append)[0]
        except TokenizationError:
            return None

    def holds(self, tail: TurnTail, append: Append, *, marked: bool = False) -> bool:
        """Whether the same ids are appended after the whole context as after a tail, or the template refuses.

        Args:
            marked: render with a marker in the turn only, which changes its text. A template may test that.
        """
        try:
            found = self.find(append, tail)[0] if marked else self.after_history(append, tail)
        except InvalidMessages:
            return True
        except TokenizationError:
            return False
        return found.appends_as(tail)

    def find(self, append: Append, guide: TurnTail | None = None) -> tuple[TurnTail, Marked]:
        """Render, and take the turn's own syntax from the tail; also returns that rendering.

        Args:
            guide: the tail of the same turn in a smaller context.
        """
        whole, marked = render_tail(self._template, append, guide.whole if guide else None)
        if guide is not None and whole == guide.whole:
            return guide, marked
        return self._without_syntax(whole, append), marked

    def _without_syntax(self, whole: Tail, append: Append) -> TurnTail:
        """Check that a tail holds the new texts, take the turn's own syntax from it, and find its close."""
        new_texts = whole.text[whole.lead : len(whole.text) - whole.foot]
        check_new_texts(new_texts, append.new, self._template.syntax.strings)
        close = self.closes.of_content(append.options)
        # the token that closes a turn may open the next message too: only the close is searched
        start, end, closers, shown = 0, len(close.text), close.closers, True
        if not whole.text[: whole.lead].startswith(close.text):
            found = self._added.find(whole.text[: whole.lead])
            end = next((token.end for token in found if token.id == close.stop), whole.lead)
        if whole.in_call:
            start, end, closers, shown = self.closes.of_call(whole, close)
        text, lead = whole.text[start:], whole.text[start : whole.lead]
        if_last = whole.text_if_last.removeprefix(whole.text[:start])
        if len(if_last) + start != len(whole.text_if_last):
            if_last = ""
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
            whole,
            text,
            tokens,
            closing,
            close_tokens,
            self._stop_if_last(lead, if_last, last),
            unclear_stop,
            own_stop,
            self._unclear_ids(text, lead, close_tokens, syntax),
            syntax,
            not shown,
        )

    def _unclear_ids(
        self, text: str, lead: str, close_tokens: tuple[Token, ...], syntax: frozenset[int]
    ) -> frozenset[int]:
        """See `TurnTail.unclear_ids`."""
        # the tail may end with the prompt of the next turn, which the prompt of this turn resembles
        elsewhere = syntax | {self.closes.last_of_prompt, self._added.id_at_end(text)}
        times = Counter(token.id for token in close_tokens)
        unclear = {token for token, count in times.items() if count > 1 or token in elsewhere}
        first = self._added.id_at(lead, len(lead) - len(lead.lstrip()))
        return frozenset(unclear if first is None or first in times else unclear | {first})

    def _stop_if_last(self, lead: str, if_last: str, last: Token | None) -> Token | None:
        """See `TurnTail.stop_if_last`; `last` is the last token that closes it where messages follow."""
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
