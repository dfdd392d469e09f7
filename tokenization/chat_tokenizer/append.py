"""What follows a sampled turn: the text of the template after the cut, as ids.

The tail of a turn is cut after what the model sampled of it, and only the rest is encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral

from chat_tokenizer.added_tokens import AddedTokens
from chat_tokenizer.encoder import NO_LIMIT, Encoder, Limit
from chat_tokenizer.errors import InvalidIds, TemplateUnsupported
from chat_tokenizer.tails import TurnTail

TURN_END_REWRITTEN = "turn_end_rewritten"
"""A note: the template ends the turn with another stop token than the sampled one."""
AppendedIds = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]
"""The ids that close a turn, the ids after them, and notes: the fields of `Appended`."""
_MAX_IDS = 2**32
"""No vocabulary has this many ids."""
_CONTEXTS = ("\n", "a", ".")
"""Texts to encode another text after, of which one mostly does not merge with it."""
_START = 32
"""As many characters of a text are encoded after each of them, to see whether its ids depend on them."""


@dataclass(frozen=True)
class Appended:
    """The next prompt of a conversation."""

    given: Sequence[int] = field(repr=False)
    """The ids given to `append`: the caller's own sequence, not a copy."""
    close_ids: list[int]
    """Ids inserted to close the turn because the model did not sample them; empty if it did."""
    suffix_ids: list[int]
    """Ids of separators, new messages and generation prompt."""
    notes: tuple[str, ...] = ()
    """Where the template would print the sampled turn differently: `turn_end_rewritten` or
    `turn_not_printed`."""
    _count: int = field(init=False, repr=False)
    """Number of the given ids at the time of the append. Ids that the caller adds later are left out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_count", len(self.given))

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The whole next prompt: the ids given, then `close_ids`, then `suffix_ids`.

        The list is built when it is first read, because copying 128k ids takes ten times as long as the rest
        of a cached append. Until then, do not change or remove any of the ids given to `append`; adding ids
        to that list is allowed. Example: `ids += appended.suffix_ids` is safe, `ids[:] = []` is not.

        Raises:
            InvalidIds: the given sequence is shorter than it was.
        """
        if len(self.given) < self._count:
            raise InvalidIds(
                "were shortened after the append: read `Appended.prompt_ids` before, or pass a copy"
            )
        given = self.given if len(self.given) == self._count else self.given[: self._count]
        return [*given, *self.close_ids, *self.suffix_ids]


def checked_last_id(prompt_ids: Sequence[int]) -> int:
    """The last id of a prompt. The other ids, which may be 100k, are not checked.

    Raises:
        InvalidIds: the prompt is empty, or its last element is not an id.
    """
    if len(prompt_ids) == 0:
        raise InvalidIds("must not be empty")
    if not isinstance(prompt_ids[-1], Integral) or prompt_ids[-1] < 0:
        raise InvalidIds(f"must hold non-negative integers, not {prompt_ids[-1]!r}")
    return prompt_ids[-1]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sampled turn ended."""

    last_id: int
    """The last sampled id."""
    stopped: bool
    """Whether a stop token ended it. One that the template does not print after this turn stands for the
    template's own. It never stands for a token that opens the next message: where such a token alone ends the
    turn, nothing is replaced."""
    cut_off: bool
    """Whether something else than the model ended it."""
    after_stop: tuple[int, ...] = ()
    """The ids after the last stop token of the model, if that is near the end; mostly none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in the tail of a turn, whose own syntax is not part of the tail."""

    position: int
    stop_text: str = ""
    """The template's stop token that ends at `position`; empty if the model did not close the turn."""
    rewritten: bool = False
    """Whether the model sampled another token where the template prints `stop_text`."""


def cut_tail(turn_tail: TurnTail, ending: Ending, last_text: str) -> Cut:
    """Cut a tail after what the model sampled of it, given the text of the last sampled id.

    Example: the tail `<|im_end|>\n<|im_start|>user...` is cut after `<|im_end|>` if that was sampled, or if
    another stop token was; if the turn was cut off, before it.

    Raises:
        TemplateUnsupported: a stop token ended the turn, and the template may close it with another; or a
            turn was cut off where the last id does not tell how much of it was sampled.
    """
    text, closing = turn_tail.text, turn_tail.closing
    last_id, stopped = ending.last_id, ending.stopped
    if turn_tail.after_stop and last_id != (turn_tail.own_stop and turn_tail.own_stop.id):
        raise TemplateUnsupported("the close of a turn that was cut off is not shown: give `history`")
    if not stopped and last_id in turn_tail.unclear_ids:
        raise TemplateUnsupported("the last id does not tell how much of the turn's close was sampled")
    unclear = [turn_tail.unclear_stop] if stopped and turn_tail.unclear_stop else []
    # where the close holds no stop token, a token that opens the next message ends the turn
    opening = turn_tail.tokens if stopped and not (closing and turn_tail.own_stop) else ()
    for token in [*(turn_tail.close_tokens or turn_tail.tokens[:1]), *unclear, *opening]:
        if token.id == last_id:
            return Cut(token.end, text[token.start : token.end])
    if_last = turn_tail.stop_if_last
    stopped_as_last = if_last is not None and if_last.id == last_id
    stopped = stopped or stopped_as_last
    # a stop token that is also syntax of the turn, such as `</tool_call>`, does not replace the close
    if not stopped or last_id in turn_tail.syntax_ids:
        blanks = _sampled_blanks(turn_tail, last_text)
        # words before the token of a close may belong to the calls' syntax, of which nothing is inserted
        words = text[: turn_tail.tokens[0].start if turn_tail.tokens else None].strip()
        if (ending.cut_off and words) or last_id in turn_tail.syntax_ids:
            _check_sampled(turn_tail.syntax + text[:blanks], last_text)
        return Cut(blanks)
    if turn_tail.unclear_stop:
        raise TemplateUnsupported("which token closes a turn depends on the conversation")
    if not closing:
        return _cut_without_close(turn_tail, last_text, stopped_as_last)
    return Cut(closing[-1].end, text[closing[-1].start : closing[-1].end], rewritten=True)


def _after_close(turn_tail: TurnTail, after_stop: str) -> Cut | None:
    """The end of a close that the ids hold already: they are those of a rendering, or the model went on.

    None if another text than the template's follows the stop token. Example: after ids that end with
    `<|im_end|>\n`, the tail `<|im_end|>\n<|im_start|>user...` is cut after the line feed.
    """
    stop = turn_tail.closing[-1] if turn_tail.closing else None
    printed = turn_tail.whole.text_if_last.removeprefix(turn_tail.syntax)
    if stop is None or not after_stop or printed[stop.end :] != after_stop:
        return None
    end = stop.end + len(after_stop)
    return Cut(end) if turn_tail.text.startswith(printed[:end]) else None


def _cut_without_close(turn_tail: TurnTail, last_text: str, stopped_as_last: bool) -> Cut:
    """As `cut_tail`, where a stop token ended the turn and the template closes it with none.

    Args:
        stopped_as_last: whether the template prints that token after a turn that is the last message.
    """
    if stopped_as_last and turn_tail.stop_if_last and turn_tail.stop_if_last.start:
        raise TemplateUnsupported(
            "the last id does not tell whether the text before the stop token was sampled"
        )
    if last_text and turn_tail.text.startswith(last_text):
        return Cut(len(last_text))  # a stop token of the request, which is ordinary text of the template
    if turn_tail.blanks:
        raise TemplateUnsupported(
            "whether a stop token stands before or after the white space after a call is not shown"
        )
    return Cut(0)


def _check_sampled(syntax: str, last_text: str) -> None:
    """Check that a turn's own syntax ends with the last sampled text: if not, some of it was not sampled.

    Example: `"}}` ends with `}}`, but `"}}</tool_call>` and `"}} #4` do not.

    Raises:
        TemplateUnsupported: it does not.
    """
    if text := last_text.strip():
        # the last token may hold more than the syntax, before it or white space after it
        end = syntax.strip().lstrip("\"'")
        ends = end.endswith(text) or text.endswith(end)
    else:
        ends = not syntax or syntax.endswith(last_text)
    if not ends:
        raise TemplateUnsupported("the last id does not tell that all of the call's syntax was sampled")


def _sampled_blanks(turn_tail: TurnTail, last_text: str) -> int:
    """How many characters of the white space between a turn's calls and their close were sampled.

    Example: 2 of the white space in `}}\n\n<|im_end|>` after the last text `}\n\n`, and 0 after `}`.

    Raises:
        TemplateUnsupported: other white space ends the last text, and ids before it may hold the rest.
    """
    blanks = turn_tail.blanks
    sampled = last_text[len(last_text.rstrip()) :]
    if not blanks or not sampled:
        return 0
    if not sampled.endswith(blanks):
        raise TemplateUnsupported(
            "the last id does not tell how much white space after the calls was sampled"
        )
    return len(blanks)


def encode_after_cut(
    encoder: Encoder, added: AddedTokens, turn_tail: TurnTail, ending: Ending, limit: Limit
) -> AppendedIds:
    """Encode the text after the cut. The added token before it, the last id or a stop token, is context only.

    Raises:
        InvalidMessages, TooManyIds, Stopped: as `Encoder.encode`, with the limit for all that is encoded.
        TemplateUnsupported: as `cut_tail`, or the tokenizer would change what stands at the edge.
    """
    last_id = ending.last_id
    known = [last_id] if last_id < _MAX_IDS else []
    last_text = b"".join(encoder.token_bytes(known).values()).decode(errors="replace")
    if ending.stopped and turn_tail.closing and not added.text(last_id):
        # ordinary text that only the request named as a stop token: the template's close follows it
        ending = replace(ending, stopped=False, cut_off=True)
    cut = _after_close(turn_tail, encoder.decode(ending.after_stop)) if ending.after_stop else None
    cut = cut or cut_tail(turn_tail, ending, last_text)
    rest = turn_tail.text[cut.position :]
    notes = turn_tail.whole.notes + ((TURN_END_REWRITTEN,) if cut.rewritten else ())
    if not rest:
        return (), (), notes
    before = cut.stop_text if cut.stop_text or added.id_at(rest, 0) is not None else added.text(last_id)
    if before:
        contexts: tuple[str, ...] = (before,)
    else:
        contexts = ("", *_CONTEXTS) if added.id_at(rest, 0) is not None else _CONTEXTS
    ids = _encode_within_text(encoder, rest, contexts, limit)
    closing = [token.id for token in turn_tail.closing if cut.position <= token.start]
    count = _length_holding(ids, closing)
    return tuple(ids[:count]), tuple(ids[count:]), notes


def _encode_within_text(encoder: Encoder, text: str, contexts: Sequence[str], limit: Limit) -> list[int]:
    """The ids that a text has where other text precedes it.

    SentencePiece vocabularies encode a text at the start of a prompt, or after an added token, with one more
    space. So it is encoded after each context in turn, until one of them keeps its own ids. The sampled ids
    are fixed, so nothing may merge across the edge. Example: ` </s>` is `▁▁ </s>` for Llama 2 at the start of
    a text, and `▁ </s>` after a line feed.

    Raises: as `encode_after_cut`.
    """
    if len(contexts) > 1:
        starts = [_after(encoder, context, text[:_START]) for context in contexts]
        if len({tuple(ids) for ids in starts if ids is not None}) > 1:
            raise TemplateUnsupported(f"the ids of {text[:20]!r} depend on the text before it")
    for context in contexts:
        if (ids := _after(encoder, context, text, limit)) is not None:
            return ids
    raise TemplateUnsupported(f"the tokenizer merges {text[:20]!r} with the text before it")


def _after(encoder: Encoder, context: str, text: str, limit: Limit = NO_LIMIT) -> list[int] | None:
    """The ids of a text after a context; None if the tokenizer merges the two."""
    head = encoder.encode(context)
    ids = encoder.encode(context + text, limit.plus(len(head)))
    return ids[len(head) :] if ids[: len(head)] == head and (head or not context) else None


def _length_holding(ids: Sequence[int], subsequence: Sequence[int]) -> int:
    """The length of the shortest prefix of `ids` that holds all of `subsequence`, in order.

    Example: 3 for ids [7, 5, 8, 9] and subsequence [7, 8].

    Raises:
        TemplateUnsupported: they do not hold it: some added tokens are found only between words.
    """
    length = 0
    for token in subsequence:
        if token not in ids[length:]:
            raise TemplateUnsupported(
                "the tokenizer does not find the token that closes the turn in its text"
            )
        length = ids.index(token, length) + 1
    return length
