"""A closed load of `simulate.py`: rollouts, their turns, and the time of their engine."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

SEED = 2026
MESSAGE_IDS = 12
"""Ids that the chat template and the number of a conversation add to a message, about."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rollouts that run at the same time; each thinks, takes a turn, and so on until its turns are taken."""

    name: str
    rollouts: int
    """At the same time, each on a connection of its own."""
    turns: int
    """Of each rollout."""
    opening_ids: int
    """Ids of the first prompt."""
    appended_ids: int
    """Ids of the message that each further turn appends, a tool's result."""
    completion_ids: int
    stream: bool = False
    think_s: float = 0.0
    """Mean of the exponential time before each turn, that of a tool."""
    service_s: float = 0.0
    """Time of the engine for an answer."""
    store: str = "Redis"
    """`Redis` or `memory`."""

    @property
    def growth_ids(self) -> int:
        """Ids that a turn adds to the next prompt."""
        return self.appended_ids + self.completion_ids

    def prompt_ids(self, turn: int) -> int:
        """Length of a turn's prompt, about; turns count from 0."""
        return self.opening_ids + turn * self.growth_ids

    def thinks(self, rollout: int) -> Iterator[float]:
        """Seconds before each turn of a rollout: the same ones in reality and in the simulation."""
        draw = random.Random(f"{SEED} think {rollout}")
        while True:
            yield draw.expovariate(1 / self.think_s) if self.think_s else 0.0
