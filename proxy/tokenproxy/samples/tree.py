"""The turns of a rollout as a tree: which turn continues which, which of them can be trained on, and the last
request of a path: its messages, tools and template arguments, as they were recorded.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokenproxy.record.turn import Turn, unpack_logprobs
from tokenproxy.record.vocabulary import Problem

T = TypeVar("T")


class Fault(msgspec.Struct, frozen=True):
    """The first turn of a path that cannot be trained on, and its problem."""

    turn: str
    reason: str


class LastRequest(NamedTuple):
    """What `last_request` returns. None for what cannot be read."""

    messages: list[Any] | None
    """All messages, the last turn's answer included."""
    answers: list[int]
    """For each turn the index of its answer in `messages`; empty if these cannot be read."""
    tools: list[Any] | None
    template_kwargs: dict[str, Any] | None


class TurnTree:
    """The turns of a rollout, and for each the first fault of its path."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = {turn.id: turn for turn in sorted(turns, key=lambda turn: turn.id)}
        self._children: dict[str, list[Turn]] = {}
        for turn in self._turns.values():
            if turn.parent is not None:
                self._children.setdefault(turn.parent, []).append(turn)
        self._faults = self._find_faults()

    def _find_faults(self) -> dict[str, Fault | None]:
        # turns that continue each other in a circle (the store is corrupt) are not reached from a first turn
        faults: dict[str, Fault | None] = {name: Fault(name, Problem.MISSING_PARENT) for name in self._turns}
        reached = [turn for turn in self._turns.values() if self._parent(turn) is None]
        for turn in reached:  # grows: parents come before their children, in any order of ids
            parent = self._parent(turn)
            inherited = faults[parent.id] if parent else None
            reason = "" if inherited else _untrainable_reason(turn, parent)
            faults[turn.id] = Fault(turn.id, reason) if reason else inherited
            reached += self._children.get(turn.id, ())
        return faults

    def _parent(self, turn: Turn) -> Turn | None:
        return None if turn.parent is None else self._turns.get(turn.parent)

    def fault(self, turn: Turn) -> Fault | None:
        """The first turn of a turn's path that cannot be trained on; None if the whole path can be."""
        return self._faults[turn.id]

    def is_leaf(self, turn: Turn) -> bool:
        """Whether no turn continues this one."""
        return not self._children.get(turn.id)

    def sound_paths(self) -> list[list[Turn]]:
        """Paths to sound turns that no sound turn continues, by id: those of leaves first."""
        sound = [turn for turn in self._turns.values() if self._faults[turn.id] is None]
        continued = {turn.parent for turn in sound}
        ends = [turn for turn in sound if turn.id not in continued]
        return [path_of(turn, self._turns) for turn in sorted(ends, key=lambda turn: not self.is_leaf(turn))]

    def faulty_leaves(self) -> Iterator[tuple[Turn, Fault]]:
        """The leaves with a fault on their path, in the order of their ids."""
        for turn in self._turns.values():
            if (fault := self._faults[turn.id]) and self.is_leaf(turn):
                yield turn, fault


def path_of(turn: Turn, turns: Mapping[str, Turn]) -> list[Turn]:
    """A turn and all turns that it continues, the first one first.

    It ends before a turn that it holds already: in a corrupt store, turns may form a circle.

    Args:
        turns: those of the rollout, by id.
    """
    path = {turn.id: turn}
    while (parent := turns.get(turn.parent or "")) is not None and parent.id not in path:
        path[parent.id] = turn = parent
    return list(path.values())[::-1]


def last_request(path: Sequence[Turn]) -> LastRequest:
    """What the last request of a path holds, and the last turn's answer to it."""
    conversation: list[Any] | None = []
    answers: list[int] = []
    for turn in path:
        messages, message = parsed(turn.messages, list), parsed(turn.message, dict)
        if conversation is None or messages is None or message is None:
            conversation = None
        else:
            answers.append(len(conversation) + len(messages))
            conversation += [*messages, message]
    tools = parsed(_last_stated(turn.tools for turn in path) or b"[]", list)
    kwargs = parsed(_last_stated(turn.template_kwargs for turn in path) or b"{}", dict)
    return LastRequest(conversation, [] if conversation is None else answers, tools, kwargs)


def parsed(stored: bytes, kind: type[T]) -> T | None:
    """Stored JSON of this type; None if it cannot be read."""
    try:
        return msgspec.json.decode(stored, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _last_stated(values: Iterable[bytes | None]) -> bytes:
    """The last value that is not None, which means "as in the turn before"; b"" if all are."""
    stated = b""
    for value in values:
        stated = stated if value is None else value
    return stated


def _untrainable_reason(turn: Turn, parent: Turn | None) -> str:
    """The problem of this turn itself, independent of the turns that it continues; empty if it has none."""
    if turn.problem:
        return turn.problem
    if turn.parent is not None and parent is None:
        return Problem.MISSING_PARENT
    if any(len(packed) % 4 for packed in (turn.appended, turn.completion, turn.logprobs)):
        return Problem.UNREADABLE_EVIDENCE
    before = parent.prompt_tokens + parent.completion_tokens if parent else 0
    if before + len(turn.appended) // 4 != turn.prompt_tokens:
        return Problem.PROMPT_LENGTH_MISMATCH
    if turn.prompt_tokens == 0:
        return Problem.NO_PROMPT_IDS
    if not turn.completion:
        return Problem.NO_COMPLETION_IDS
    if not turn.logprobs:
        return Problem.NO_LOGPROBS
    if len(turn.logprobs) != len(turn.completion):
        return Problem.LOGPROBS_MISMATCH
    return "" if all(map(math.isfinite, unpack_logprobs(turn.logprobs))) else Problem.LOGPROBS_NOT_FINITE
