"""Turns at hand: their exact ids as JSON, ready to be extended, and what it takes to recognise them.

A store keeps differences; joining those of a long conversation again at every turn would cost what rendering
costs. What was recorded or read lately is kept whole here, bounded by bytes. Nothing depends on it but speed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.history.turn import Turn, unpack_ids
from tokenization import ids


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a turn is recognised by. Parents are shared, so a conversation of n turns holds n of these."""

    turn: str
    strict_before: bytes
    strict: bytes
    reasonings: tuple[bytes, ...]
    parent: "Lineage | None"

    def all_reasonings(self) -> list[bytes]:
        """Of each assistant message since the conversation began, the first one first."""
        parts: list[tuple[bytes, ...]] = []
        at: Lineage | None = self
        while at is not None:
            parts.append(at.reasonings)
            at = at.parent
        return [reasoning for part in reversed(parts) for reasoning in part]


@dataclass(frozen=True, slots=True)
class Known:
    """A recorded turn with its exact ids."""

    lineage: Lineage
    rollout: str
    raw: bytes
    """Prompt and completion as a JSON array."""
    count: int
    """Number of ids in it."""
    finish_reason: str | None
    stop_reason: str | int | None
    usable: bool
    """Whether the ids are the whole truth: sampled ids are known, and no media stand behind them."""

    @property
    def turn(self) -> str:
        """The turn's id."""
        return self.lineage.turn

    def begins(self, prompt: bytes) -> bool:
        """Whether a prompt, a compact JSON array, begins with these ids."""
        end = len(self.raw) - 1
        return self.usable and prompt[end : end + 1] in (b",", b"]") and prompt[:end] == self.raw[:end]


class KnownTurns:
    """The turns used last, at most `max_bytes` of their ids. Safe across threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._turns: OrderedDict[str, Known] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, turn: str) -> Known | None:
        """A turn, if it is at hand."""
        with self._lock:
            found = self._turns.get(turn)
            if found is not None:
                self._turns.move_to_end(turn)
            return found

    def put(self, known: Known) -> None:
        """Keep a turn; those not used for longest leave."""
        with self._lock:
            before = self._turns.pop(known.turn, None)
            self._bytes += len(known.raw) - (len(before.raw) if before else 0)
            self._turns[known.turn] = known
            while self._bytes > self._max_bytes and len(self._turns) > 1:
                _, gone = self._turns.popitem(last=False)
                self._bytes -= len(gone.raw)

    def drop(self, rollout: str) -> None:
        """Forget the turns of a rollout that was deleted."""
        with self._lock:
            for turn in [turn for turn, known in self._turns.items() if known.rollout == rollout]:
                self._bytes -= len(self._turns.pop(turn).raw)


UNUSABLE = frozenset(
    {"no_prompt_ids", "no_completion_ids", "ids_missing", "usage_mismatch", "prompt_mismatch", "media"}
)
"""Problems of a turn that keep others from being built on its ids."""


def make_known(turn: Turn, parent: Known | None, prompt: bytes, completion: Sequence[int]) -> Known:
    """A turn that was just recorded.

    Args:
        prompt: its whole prompt as a JSON array; empty if unknown.
    """
    usable = turn.problem not in UNUSABLE and len(prompt) > 2 and (parent is None or parent.usable)
    return Known(
        _lineage(turn, parent.lineage if parent else None),
        turn.rollout,
        ids.join(prompt, completion) if len(prompt) > 2 else b"[]",
        turn.prompt_tokens + len(completion),
        turn.finish_reason,
        turn.stop_reason,
        usable,
    )


def read_known(path: Sequence[Turn], at_hand: Callable[[str], Known | None] = lambda turn: None) -> Known:
    """The last turn of a path out of a store; what is at hand of it is not joined again."""
    base: Known | None = None
    first = len(path)
    while first > 0 and (base := at_hand(path[first - 1].id)) is None:
        first -= 1
    lineage = base.lineage if base else None
    count, usable = (base.count, base.usable) if base else (0, True)
    parts: list[bytes] = []
    for turn in path[first:]:
        lineage = _lineage(turn, lineage)
        parts += turn.appended, turn.completion
        count += (len(turn.appended) + len(turn.completion)) // 4
        adds_up = count == turn.prompt_tokens + turn.completion_tokens
        usable = usable and adds_up and turn.problem not in UNUSABLE
    assert lineage is not None  # a path has at least one turn
    tokens, last = unpack_ids(b"".join(parts)), path[-1]
    return Known(
        lineage,
        last.rollout,
        ids.join(base.raw, tokens) if base else ids.dump(tokens),
        count,
        last.finish_reason,
        last.stop_reason,
        usable and count > 0,
    )


def _lineage(turn: Turn, parent: Lineage | None) -> Lineage:
    return Lineage(turn.id, turn.strict_before, turn.strict, turn.reasonings, parent)
