"""The load of the fleet benchmark: conversations of agents, with a seed, as numbers of ids.

Half of the conversations come in groups of equal openings, as the rollouts of a prompt in GRPO; the others
share at most a system message. Lengths are long-tailed: most conversations are short, some are very long.
"""

import random
from collections.abc import Hashable
from dataclasses import dataclass

from benchmarks.fleet_model import BLOCK_IDS

GROUP = 8
"""Rollouts of one prompt."""
FAMILIES = 4
"""Different system messages."""
_SEED = 2026
_PAUSE_S = 0.14
"""Mean time that a tool takes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    appended_ids: int
    """Ids that are new in its prompt: the opening, or a tool's result."""
    completion_ids: int
    pause_s: float
    """Time the tool takes before this turn's request; 0 for the first turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One agent's conversation."""

    number: int
    family: int
    """Number of its system message."""
    group: int | None
    """Conversations of one group have equal openings."""
    system_ids: int
    """Ids of the system message."""
    turns: tuple[Turn, ...]
    session: bool
    """Whether the client sends X-Session-ID."""

    @property
    def opening_ids(self) -> int:
        """Ids of the first prompt."""
        return self.turns[0].appended_ids

    def prompt_ids(self, turn: int) -> int:
        """Length of a turn's prompt."""
        earlier = sum(one.appended_ids + one.completion_ids for one in self.turns[:turn])
        return earlier + self.turns[turn].appended_ids

    def blocks(self, turn: int) -> list[Hashable]:
        """A key for each full block of a turn's prompt and completion."""
        full = (self.prompt_ids(turn) + self.turns[turn].completion_ids) // BLOCK_IDS
        return [self._block(number) for number in range(full)]

    def _block(self, number: int) -> Hashable:
        end = (number + 1) * BLOCK_IDS
        if end <= self.system_ids:
            return ("family", self.family, number)
        if end <= self.opening_ids and self.group is not None:
            return ("group", self.group, number)
        return ("conversation", self.number, number)


def make_load(count: int = 400, *, seed: int = _SEED, sessions: float = 0.25) -> list[Conversation]:
    """Conversations in the order in which they start; a group starts together.

    Args:
        sessions: share of the conversations whose client sends a session id.
    """
    draw = random.Random(seed)
    system_ids = [draw.randrange(3, 10) * BLOCK_IDS for _ in range(FAMILIES)]
    conversations: list[Conversation] = []
    groups = 0
    while len(conversations) < count:
        family = draw.randrange(FAMILIES)
        question = _long_tailed(draw, 400, 4000)
        members, group = (GROUP, groups) if len(conversations) % (2 * GROUP) < GROUP else (1, None)
        groups += group is not None
        for _ in range(min(members, count - len(conversations))):
            opening = system_ids[family] + question
            conversations.append(
                Conversation(
                    number=len(conversations),
                    family=family,
                    group=group,
                    system_ids=system_ids[family],
                    turns=_turns(draw, opening),
                    session=draw.random() < sessions,
                )
            )
    return conversations


def _turns(draw: random.Random, opening: int) -> tuple[Turn, ...]:
    count = min(30, max(2, round(draw.lognormvariate(1.9, 0.6))))
    first = Turn(opening, _long_tailed(draw, 150, 1500), 0.0)
    later = (
        Turn(_long_tailed(draw, 350, 6000), _long_tailed(draw, 150, 1500), draw.expovariate(1 / _PAUSE_S))
        for _ in range(count - 1)
    )
    return (first, *later)


def _long_tailed(draw: random.Random, median: int, most: int) -> int:
    """A number of ids, log-normal around `median`."""
    return max(16, min(most, round(median * draw.lognormvariate(0.0, 0.9))))
