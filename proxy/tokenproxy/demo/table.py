"""A plain-text table of two conversations side by side, for a terminal of 100 columns."""

from collections.abc import Sequence
from itertools import zip_longest

from tokenproxy.demo.conversation import Conversation, Turn

WIDTH = 100

_SIDE = (("prompt", 7), ("reused", 7), ("added", 6), ("exact", 6), ("cached", 7), ("out", 4), ("s", 5))
_SIDE_WIDTH = sum(width for _, width in _SIDE)
_LEGEND = (
    "prompt: ids in the prompt; reused: its first ids, equal to those of the turn before; added:",
    "the ids after them; exact: all ids of the turn before, prompt and completion, are reused; cached:",
    "ids from the engine's prefix cache (whole blocks); out: ids sampled; s: seconds.",
)


def render(left: Conversation, right: Conversation) -> str:
    """The table, a legend and a summary line for each conversation. No line is longer than `WIDTH`."""
    lines = [
        _line("", "", left.route.center(_SIDE_WIDTH), right.route.center(_SIDE_WIDTH)),
        _line("turn", "kind", *(_cells([name for name, _ in _SIDE]) for _ in range(2))),
        "-" * len(_line("", "", " " * _SIDE_WIDTH, " " * _SIDE_WIDTH)),
    ]
    for left_turn, right_turn in zip_longest(left.turns, right.turns):
        turn = left_turn or right_turn
        lines.append(_line(str(turn.number), turn.kind, _side(left_turn), _side(right_turn)))
    return "\n".join(line.rstrip() for line in [*lines, "", *_LEGEND, "", summary(left), summary(right)])


def summary(conversation: Conversation) -> str:
    """One line with the number of follow-up turns that are exact, and of those that drifted."""
    total, exact = conversation.follow_ups, conversation.exact
    if total == 0:
        return f"{conversation.route}: no follow-up turns"
    drifted = total - exact
    line = f"{conversation.route}: {exact} of {total} follow-up turns exact ({exact / total:.0%})"
    return f"{line}, {drifted} drifted" if drifted else line


def _line(number: str, kind: str, left: str, right: str) -> str:
    return f"{number:>4} {kind:<6} |{left} |{right}"


def _side(turn: Turn | None) -> str:
    if turn is None:
        return " " * _SIDE_WIDTH
    exact = {None: "-", True: "yes", False: "NO"}[turn.exact]
    cached = "?" if turn.cached is None else str(turn.cached)
    values = [turn.prompt, turn.reused, turn.appended, exact, cached, turn.completion, f"{turn.seconds:.1f}"]
    return _cells(values)


def _cells(values: Sequence[object]) -> str:
    return "".join(f"{value!s:>{width}}" for value, (_, width) in zip(values, _SIDE, strict=True))
