"""What a turn costs: measured at some lengths, calculated for all others. `simulate.py calibrate` measures.

A cost is measured for the first turn of a rollout and for later ones, at some lengths of the prompt, with
answers of `REFERENCE` sampled ids after results of `APPENDED` ids. Between two lengths it is interpolated,
and beyond them extrapolated, in a straight line. Each further sampled or appended id costs the same.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec

SEED = 2026
REFERENCE, APPENDED = 200, 400
"""Sampled ids of an answer, and ids of the message before it, in the measurements."""
CPU_QUANTITIES = ("proxy_ms", "client_ms", "engine_ms", "redis_ms")
QUANTITIES = (*CPU_QUANTITIES, "redis_bytes", "memory_bytes", "aof_bytes", "client_bytes", "engine_bytes")
"""What a turn uses."""
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
class Case:
    """Rollouts that run at the same time; each thinks, takes a turn, and so on until its turns are taken."""

    name: str
    rollouts: int
    turns: int
    """Of each rollout."""
    opening_ids: int = 1_500
    appended_ids: int = APPENDED
    """Ids of the message that each further turn appends, a tool's result."""
    completion_ids: int = REFERENCE
    stream: bool = False
    think_s: float = 0.05
    """Mean of the exponential time before each turn, that of a tool."""
    service_s: float = 0.05
    """Time of the engine for an answer."""
    store: str = "Redis"
    """`Redis` or `memory`."""

    @property
    def way(self) -> str:
        """As `Costs.turns` names it."""
        return f"{self.store} {'stream' if self.stream else 'whole'}"

    def kinds(self) -> list[TurnKind]:
        """The turns of a rollout."""
        grown = self.appended_ids + self.completion_ids
        return [
            TurnKind(self.opening_ids + n * grown, self.appended_ids, self.completion_ids, n == 0)
            for n in range(self.turns)
        ]

    def thinks(self, rollout: int) -> Iterator[float]:
        """Seconds before each turn of a rollout: the same ones in reality and in the simulation."""
        draw = random.Random(f"{SEED} think {rollout}")
        while True:
            yield draw.expovariate(1 / self.think_s) if self.think_s else 0.0


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
        return max(
            0.0, interpolate(self.later, turn.prompt_ids) + more + (turn.appended_ids - APPENDED) * new
        )


@dataclass(frozen=True, slots=True)
class TurnCosts:
    """All quantities with one store, of whole or of streamed answers."""

    curves: dict[str, Curve]
    apart: dict[str, float]
    """Milliseconds that a turn costs more of each CPU quantity if its steps arrive at an idle event loop: it
    wakes up for each step, and for each chunk of a stream."""

    def of(self, quantity: str, turn: TurnKind) -> float:
        """A quantity for a turn."""
        return self.curves[quantity].of(turn)

    def mean(self, quantity: str, turns: Sequence[TurnKind]) -> float:
        """Of a turn, on average over a rollout."""
        return mean(self.of(quantity, turn) for turn in turns)


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
    """Points whose values do not fall: longer prompts never cost less, so that would be noise."""
    raised = [points[0]]
    for x, y in points[1:]:
        raised.append((x, max(y, raised[-1][1])))
    return tuple(raised)
