"""What a turn costs: measured at some lengths, calculated for all others. `simulate.py calibrate` measures.

A cost is measured for the first turn of a rollout and for later ones, at some lengths of the prompt, with
answers of `REFERENCE` sampled ids after results of `APPENDED` ids. Between two lengths it is interpolated,
and beyond them extrapolated, in a straight line. Each further sampled or appended id costs the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

REFERENCE, APPENDED = 200, 400
"""Sampled ids of an answer, and ids of the message before it, in the measurements."""
QUANTITIES = (
    "proxy_ms",
    "client_ms",
    "engine_ms",
    "redis_ms",
    "redis_calls",
    "redis_bytes",
    "memory_bytes",
    "aof_bytes",
    "client_bytes",
    "engine_bytes",
)
"""What a turn uses; as in `scale_bench.Measured`."""
CPU_QUANTITIES = QUANTITIES[:4]

Points = tuple[tuple[float, float], ...]
"""(ids of the prompt, quantity), by growing ids."""


@dataclass(frozen=True, slots=True)
class TurnKind:
    """A turn whose cost is asked for."""

    prompt_ids: float
    appended_ids: float
    """Ids that are new in its prompt."""
    completion_ids: float
    first: bool = False
    """Whether it is the first one of its rollout, whose prompt is all new."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a turn."""

    first: Points
    later: Points
    per_completion_id: float = 0.0

    def of(self, turn: TurnKind) -> float:
        """The quantity for a turn; never negative."""
        more = (turn.completion_ids - REFERENCE) * self.per_completion_id
        if turn.first:
            return max(0.0, interpolate(self.first, turn.prompt_ids) + more)
        # a first turn's prompt is all new, so what it costs more per id is the cost of a new id
        new = max(0.0, _slope(self.first) - _slope(self.later))
        more += (turn.appended_ids - APPENDED) * new
        return max(0.0, interpolate(self.later, turn.prompt_ids) + more)


@dataclass(frozen=True, slots=True)
class TurnCosts:
    """All quantities with one store, of whole or of streamed answers."""

    curves: dict[str, Curve]
    """By quantity."""
    apart: dict[str, float]
    """Milliseconds that a turn costs more of each CPU quantity if its steps arrive at an idle event loop: it
    wakes up for each step, and for each chunk of a stream."""

    def of(self, quantity: str, turn: TurnKind) -> float:
        """A quantity for a turn."""
        return self.curves[quantity].of(turn)


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that was measured."""

    machine: dict[str, str]
    turns: dict[str, TurnCosts]
    """By store and way: `Redis whole`, `Redis stream`, `memory whole`."""
    search_ms: float = 0.0
    """CPU of Redis for one look-up of a conversation."""
    probe_ms: float = 0.0
    """CPU of a proxy process to check one engine once."""
    scripts: float = 0.0
    """Requests of the proxy to Redis per turn."""
    others: float = 0.0
    """Share of the proxy's core that other programs used during the measurement."""
    notes: dict[str, Any] = field(default_factory=dict)

    def turn(self, store: str, stream: bool) -> TurnCosts:
        """The costs with a store, of whole or streamed answers."""
        return self.turns[f"{store} {'stream' if stream else 'whole'}"]

    def write(self, file: Path) -> None:
        """Write them as JSON."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, file: Path) -> "Costs":
        """Read what `write` wrote.

        Raises:
            ValueError: the file is missing, or is not of this kind.
        """
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"{file}: {error}; measure first: simulate.py calibrate") from error


def interpolate(points: Points, at: float) -> float:
    """The value of straight lines through the points; the outer lines go on.

    With points (1, 10) and (3, 30), the value at 2 is 20, and at 4 it is 40.
    """
    if len(points) == 1:
        return points[0][1]
    upper = min(max(bisect_left([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _slope(points: Points) -> float:
    (x0, y0), (x1, y1) = points[0], points[-1]
    return (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0


def rising(points: Sequence[tuple[float, float]]) -> Points:
    """Points whose values do not fall: a measurement below the one before it is raised to it.

    Longer prompts never cost less, so that is noise; an extrapolated line would amplify it.
    """
    raised = [points[0]]
    for (_, before), (x, y) in pairwise([points[0], *points[1:]]):
        raised.append((x, max(y, before, raised[-1][1])))
    return tuple(raised)
