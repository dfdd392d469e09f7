"""What the prompt of a turn would have been without the record: the drift lane.

Two comparisons with the recorded prompt:

- `template`: the chat template's own rendering of the same conversation, which a server without a record
  sends to the model. Where they differ, the model would not have seen what it sampled.
- `before`: the ids of the earlier turn that a rendered prompt should have continued. Where they differ, the
  model did not see what it had sampled.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from chat_tokenizer import ChatTokenizer, TokenizationError
from chat_tokenizer.ids_difference import Hunk, difference
from tokenproxy.base.errors import RendererUnavailable
from tokenproxy.record.turn import Turn
from tokenproxy.samples.tree import last_request, path_of
from tokenproxy.viewer.breaks import breaks_of
from tokenproxy.viewer.tokens import ids_of, prompt_ids, spell


class Basis(StrEnum):
    """What a recorded prompt is compared with."""

    TEMPLATE = "template"
    BEFORE = "before"


class Change(StrEnum):
    """How one side of a hunk differs from the other."""

    SAME_TEXT = "same_text"
    """The same text in other tokens."""
    LEFT_OUT = "left_out"
    """The other side has nothing here, as where a template strips thinking."""
    ADDED = "added"
    """Only the other side has something here."""
    OTHER_TEXT = "other_text"
    """Another text, as where a template spells arguments anew."""
    OTHER_IDS = "other_ids"
    """The ids differ, and there is no tokenizer that spells them."""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between the recorded prompt of a turn and another list of ids."""

    basis: Basis
    turn: str
    count: int = 0
    """Number of ids in the recorded prompt."""
    other: int = 0
    """Number of ids on the other side."""
    first: int | None = None
    """Index of the first id that differs; None if none does."""
    hunks: list[tuple[int, int, list[int], Change]] = []
    """[start, end, ids of the other side, how]: `prompt_ids[start:end]` is something else there."""
    texts: dict[str, str] = {}
    """As `Header.texts`, for the ids of the other side."""
    reason: str = ""
    """Why nothing could be compared; empty if it was."""


def drift_lane(
    turns: Sequence[Turn], path: Sequence[Turn], basis: str, tokenizer: ChatTokenizer | None, note: str = ""
) -> Lane:
    """The comparison for the prompt of a path's last turn.

    Args:
        turns: all turns of the session.
        basis: a `Basis`; empty for the earlier turn if the prompt broke with one, else the template.
        note: why there is no tokenizer.
    """
    turn, recorded = path[-1], prompt_ids(path).tolist()
    found = breaks_of(turns).get(turn.id)
    if basis == Basis.TEMPLATE or (not basis and found is None):
        rendered = _rendered(path, tokenizer) if tokenizer is not None else note
        if isinstance(rendered, str):
            return Lane(basis=Basis.TEMPLATE, turn=turn.id, count=turn.prompt_tokens, reason=rendered)
        hunks = difference(recorded, rendered)
        return _lane(Basis.TEMPLATE, turn, recorded, len(rendered), hunks, tokenizer)
    if found is None:
        return Lane(basis=Basis.BEFORE, turn=turn.id, reason="the prompt did not break with an earlier turn")
    by_id = {each.id: each for each in turns}
    before = ids_of(path_of(by_id[found.turn], by_id)).tolist()
    hunks = difference(recorded, before)
    if hunks and hunks[-1].end == len(recorded):  # what the prompt holds after the earlier turn's end is new
        last = hunks.pop()
        if last.ids:  # the earlier turn ends differently: mark as many ids as it has there
            hunks.append(Hunk(last.start, min(last.end, last.start + len(last.ids)), last.ids))
    return _lane(Basis.BEFORE, turn, recorded, len(before), hunks, tokenizer)


def _rendered(path: Sequence[Turn], tokenizer: ChatTokenizer) -> list[int] | str:
    """The template's rendering of the last request of a path; a reason if there is none."""
    if path[0].parent is not None:
        return "the first turns of this conversation are missing: deleted, or evicted"
    if any(turn.images for turn in path):
        return "the prompt holds images, which the template alone does not render to ids"
    messages, _answers, tools, kwargs = last_request(path)
    if messages is None or tools is None or kwargs is None:
        return "the recorded messages, tools or template arguments cannot be read"
    if not messages[:-1]:
        return "the messages of this prompt were not recorded"
    reserved = tokenizer.reserved(kwargs)
    variables = {name: value for name, value in kwargs.items() if name not in reserved}
    try:
        return tokenizer.render(messages[:-1], tools=tools or None, template_kwargs=variables)
    except (TokenizationError, RendererUnavailable) as error:
        return f"the template does not render this conversation: {error}"


def _lane(
    basis: Basis,
    turn: Turn,
    recorded: Sequence[int],
    other: int,
    hunks: Sequence[Hunk],
    tokenizer: ChatTokenizer | None,
) -> Lane:
    replaced = [recorded[hunk.start : hunk.end] for hunk in hunks]
    own = spell([token for ids in replaced for token in ids], tokenizer)
    texts = spell([token for hunk in hunks for token in hunk.ids], tokenizer)
    return Lane(
        basis=basis,
        turn=turn.id,
        count=len(recorded),
        other=other,
        first=hunks[0].start if hunks else None,
        hunks=[
            (hunk.start, hunk.end, hunk.ids, _change(_text(ids, own), _text(hunk.ids, texts)))
            for hunk, ids in zip(hunks, replaced, strict=True)
        ],
        texts=texts,
    )


def _text(ids: Sequence[int], texts: dict[str, str]) -> str | None:
    """The text of ids; None if one of them has none."""
    spelled = [texts.get(str(token)) for token in ids]
    return None if None in spelled else "".join(text for text in spelled if text is not None)


def _change(recorded: str | None, other: str | None) -> Change:
    if recorded is None or other is None:
        return Change.OTHER_IDS
    if recorded == other:
        return Change.SAME_TEXT
    if not other:
        return Change.LEFT_OUT
    return Change.OTHER_TEXT if recorded else Change.ADDED
