"""Encodes what follows a sampled turn: the text of the template after the cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenization.added_tokens import AddedTokens
from tokenization.cut import Cut
from tokenization.discovery import TurnTail
from tokenization.encoder import Encoder
from tokenization.errors import TemplateUnsupported
from tokenization.limit import NO_LIMIT, Limit
from tokenization.notes import TURN_END_REWRITTEN


@dataclass(frozen=True, slots=True)
class Continuation:
    """The ids after a sampled turn. They depend on no id before it but the last."""

    close_ids: tuple[int, ...]
    """Ids that close the turn because the model did not sample them; empty if it did."""
    suffix_ids: tuple[int, ...]
    """Ids of separators, new messages and generation prompt."""
    notes: tuple[str, ...] = ()
    """Where the template would print the sampled turn differently: see `tokenization.notes`."""


def token_before(added: AddedTokens, turn_tail: TurnTail, cut: Cut, last_id: int) -> str:
    """The token to encode before the text after the cut, as context; empty if that needs none.

    Text that does not begin with an added token is encoded after the token before it, because some tokenizers
    (SentencePiece) encode it differently at the start of a text.
    """
    rest = turn_tail.tail.text[cut.position :]
    if cut.stop_text or added.start(rest):
        return cut.stop_text
    return added.text(last_id)


def encode_after_cut(
    encoder: Encoder,
    added: AddedTokens,
    turn_tail: TurnTail,
    cut: Cut,
    before: str,
    limit: Limit = NO_LIMIT,
) -> Continuation:
    """Encode the text after the cut; `before`, the token before it, is context only and may be empty.

    Without an added token at the edge the text is encoded alone: the sampled ids are fixed, so the tokenizer
    has nothing to merge it with.

    Raises:
        InvalidMessages, TooManyIds, Stopped: as `Encoder.encode`, with the limit for all that is encoded.
        TemplateUnsupported: the tokenizer would change what stands at the edge.
    """
    rest = turn_tail.tail.text[cut.position :]
    notes = turn_tail.tail.notes + ((TURN_END_REWRITTEN,) if cut.rewritten else ())
    if not rest:
        return Continuation((), (), notes)
    ids = encoder.encode(before + rest, limit.plus(1) if before else limit)
    if not before and _leading_spaces(encoder.decode(ids)) > _leading_spaces(rest):
        raise TemplateUnsupported(
            f"the tokenizer puts a space before {rest[:20]!r}, which follows the sampled text directly"
        )
    if before:
        first, *ids = ids
        if added.text(first) != before:
            raise TemplateUnsupported("the tokenizer merges the stop token with the text after it")
    closing = [token.id for token in turn_tail.closing if cut.position <= token.start]
    count = _length_holding(ids, closing)
    return Continuation(tuple(ids[:count]), tuple(ids[count:]), notes)


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


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
