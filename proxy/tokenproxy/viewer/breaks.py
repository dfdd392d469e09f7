"""Where the prompt of a turn broke with what was recorded before it.

A turn without a parent begins a tree. If its messages hold an assistant's, it continues a conversation, and
its prompt should have begun with the ids of an earlier turn: of those with the longest common prefix. Where a
client gave ids without messages, they continue a conversation if they share sampled ids with an earlier turn.

A prompt that another choice or request sampled from before did not break there: all its ids are recorded.
Nothing is compared with turns whose first ancestors are missing.
"""

from collections.abc import Sequence
from itertools import islice

import msgspec

from chat_tokenizer.ids_difference import common_prefix
from tokenproxy.record.turn import Turn
from tokenproxy.record.vocabulary import Reason
from tokenproxy.samples.tree import parsed, path_of
from tokenproxy.viewer.tokens import ids_of, packed_ids

_CANDIDATES = 16
"""Earlier turns that are compared, the latest ones, so that a session takes time linear in its turns."""


class Break(msgspec.Struct, frozen=True):
    """A prompt that does not continue the earlier turn with which it has most ids in common."""

    turn: str
    """The earlier turn."""
    equal: int
    """Number of ids with which both begin."""
    total: int
    """Number of ids of the earlier turn. The prompt drifted if it holds fewer of them."""


def breaks_of(turns: Sequence[Turn]) -> dict[str, Break]:
    """The breaks of a session, by the id of the turn whose prompt broke."""
    in_order = sorted(turns, key=lambda turn: turn.id)
    by_id = {turn.id: turn for turn in in_order}
    breaks: dict[str, Break] = {}
    for position, turn in enumerate(in_order):
        if turn.parent is not None or not turn.appended or turn.reason == Reason.FIRST_TURN:
            continue
        compared = (_compare(turn, each, by_id) for each in _candidates(in_order, position))
        comparable = [each for each in compared if each is not None]
        found = max(comparable, key=lambda each: (each.equal, each.turn), default=None)
        if found is None:
            continue
        if answers(turn) or found.equal > by_id[found.turn].prompt_tokens:
            breaks[turn.id] = found
    return breaks


def _candidates(in_order: Sequence[Turn], position: int) -> list[Turn]:
    """The latest turns before a position that other requests sampled."""
    request = in_order[position].request
    others = map(in_order.__getitem__, range(position - 1, -1, -1))
    latest = islice((each for each in others if each.request != request), _CANDIDATES)
    return [each for each in latest if each.completion]


def answers(turn: Turn) -> bool:
    """Whether the messages of a turn hold an assistant's, so that they continue a conversation."""
    if b"assistant" not in turn.messages:  # most need not be parsed
        return False
    messages = parsed(turn.messages, list) or []
    return any(isinstance(each, dict) and each.get("role") == "assistant" for each in messages)


def _compare(turn: Turn, earlier: Turn, by_id: dict[str, Turn]) -> Break | None:
    """The comparison with one earlier turn; None if it tells nothing."""
    path = path_of(earlier, by_id)
    if path[0].parent is not None:
        return None
    prompt, before = packed_ids(turn.appended), ids_of(path)
    equal = common_prefix(prompt, before)
    return Break(earlier.id, equal, len(before)) if equal < len(prompt) else None
