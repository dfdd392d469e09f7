"""What the list shows of a rollout's turns: the first message, the last answer, how many prompts drifted.

To summarise a rollout, all its turns are read. So a request reads a limited number of bytes, and summaries
are kept until their rollouts get turns; a page that finds some missing asks again.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenproxy.record.store import Session, Store
from tokenproxy.record.turn import Turn
from tokenproxy.record.vocabulary import Reason, Source
from tokenproxy.samples.tree import parsed
from tokenproxy.viewer.breaks import Break, answers, breaks_of

READ_BYTES = 32 * 2**20
"""Of turns, as the store keeps them, that one request reads to summarise rollouts."""
_KEPT = 20_000
"""Summaries that are kept, about 20 MB."""
_AT_ONCE = 1000
"""Kept summaries that are looked up before other requests have their turn."""
_CHARACTERS = 240
_NO_TEXT = ("role", "type", "id", "tool_call_id")
"""Keys of a message whose values nobody searches for."""


class Summary(msgspec.Struct, frozen=True):
    """A line about a rollout."""

    first: str = ""
    """The first message of a user, else the first of all, shortened."""
    last: str = ""
    """The last answer, shortened."""
    turns: int = 0
    drifted: int = 0
    """Turns that are not exact: their prompts continue a conversation, and not with its recorded ids."""
    drift: str | None = None
    """The first of them."""


def summary_of(turns: Sequence[Turn], breaks: Mapping[str, Break] | None = None) -> Summary:
    """The summary of a rollout, given all its turns in the order of their ids.

    Args:
        breaks: as `breaks_of` returns them, if they are known.
    """
    if not turns:
        return Summary()
    found = breaks_of(turns) if breaks is None else breaks
    drifted = [turn.id for turn in turns if _drifted(turn, found.get(turn.id))]
    messages = [each for each in parsed(turns[0].messages, list) or [] if isinstance(each, dict)]
    first = next((each for each in messages if each.get("role") == "user"), messages[0] if messages else {})
    last = parsed(turns[-1].message, dict) or {}
    return Summary(_line(first), _line(last), len(turns), len(drifted), drifted[0] if drifted else None)


def mentions(turns: Sequence[Turn], words: str) -> bool:
    """Whether a message of these turns holds words, which are in lower case."""
    found = (parsed(stored, object) for turn in turns for stored in (turn.messages, turn.message))
    return any(words in text.lower() for message in found for text in _texts(message))


class Summaries:
    """The summaries of the rollouts that pages have shown. For one event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[float, int], Summary]] = {}
        """By the rollout's id, with what changes when it gets turns; the least recently shown first."""

    async def read(self, store: Store, sessions: Sequence[Session]) -> tuple[dict[str, Summary], bool]:
        """Summaries by the id of the rollout, and whether another request would find more of them.

        A rollout that alone exceeds `READ_BYTES` has none.
        """
        found: dict[str, Summary] = {}
        left, complete = READ_BYTES, True
        for number, session in enumerate(sessions):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            state = session.created, session.turns
            before, summary = self._kept.pop(session.id, (None, Summary()))
            if before != state:
                if session.size > READ_BYTES:
                    continue
                left -= session.size
                complete = complete and left >= 0
                if not complete:
                    continue
                turns = await store.turns(session.id) if session.turns else []
                summary = await asyncio.to_thread(summary_of, turns)
            self._kept[session.id] = state, summary
            found[session.id] = summary
        for oldest in list(self._kept)[:-_KEPT]:
            del self._kept[oldest]
        return found, not complete


def _drifted(turn: Turn, found: Break | None) -> bool:
    if found is not None:
        return found.equal < found.total
    rendered = turn.parent is None and turn.source == Source.RENDERED
    # without an earlier turn to compare with, what was continued is not recorded here
    return rendered and turn.reason not in (Reason.NO_MATCH, Reason.NO_IDS) and answers(turn)


def _line(message: Mapping[str, Any]) -> str:
    """A message as one line: its content and calls; of one that has neither, whatever it has."""
    texts = [*_texts(message.get("content")), *_texts(message.get("tool_calls"))]
    shown = " ".join(" ".join(texts or _texts(message)).split())
    return shown if len(shown) <= _CHARACTERS else shown[: _CHARACTERS - 1] + "…"


def _texts(message: object) -> Iterator[str]:
    """All texts in a message, or in a part of it, in order."""
    waiting = [message]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            waiting += [value[key] for key in reversed(value) if key not in _NO_TEXT]
