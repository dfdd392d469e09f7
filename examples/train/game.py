"""The environment: the model guesses a number with a tool, which tells whether the secret is higher or lower.

Each game is a conversation of up to `TURNS` turns. Its prompt shows one finished game: without an example, a
model of 135M parameters seldom calls a tool.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TURNS = 4
HIGHEST = 100
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}
_EXAMPLE = ((50, "lower"), (25, "higher"), (37, "correct"))

Message = dict[str, Any]


def opening(number: int) -> str:
    """The user's message that begins a game."""
    return f"Game {number}: guess my number from 1 to {HIGHEST}."


def prompt(number: int) -> list[Message]:
    """The messages before the model's first turn: an example, then the game of this number."""
    messages: list[Message] = [{"role": "user", "content": opening(0)}]
    for place, (guess, result) in enumerate(_EXAMPLE):
        function = {"name": "guess", "arguments": json.dumps({"number": guess})}
        call = {"id": f"example-{place}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    return [*messages, {"role": "user", "content": opening(number)}]


@dataclass
class Game:
    """One game; the number of a game decides its secret."""

    number: int
    scores: list[float] = field(default_factory=list)
    """Of each turn so far, 0 to 1: how close its guess was; 0 without a readable call."""

    @property
    def secret(self) -> int:
        """What the model has to guess."""
        return random.Random(self.number).randint(1, HIGHEST)

    @property
    def over(self) -> bool:
        """Whether the number was guessed, or no turn is left."""
        return 1.0 in self.scores or len(self.scores) == TURNS

    @property
    def reward(self) -> float:
        """Mean score over all turns; those that a correct guess saved count 1."""
        saved = TURNS - len(self.scores) if 1.0 in self.scores else 0
        return (sum(self.scores) + saved) / TURNS

    def respond(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Score a turn by its tool calls, and return the environment's messages after it."""
        new: list[Message] = []
        score = 0.0
        for call in calls:
            content = f"error: guess a number from 1 to {HIGHEST}"
            guess = _guess_of(call)
            if guess is not None:
                content = "correct" if guess == self.secret else "higher" if guess < self.secret else "lower"
                score = max(score, 1 - abs(guess - self.secret) / HIGHEST)
            new.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        self.scores.append(score)
        return new or [{"role": "user", "content": "Please call guess."}]


def _guess_of(call: Mapping[str, Any]) -> int | None:
    """The guess of a tool call; None if the call is not one of the game."""
    try:
        guess = json.loads(call["function"]["arguments"])["number"]
    except (ValueError, KeyError, TypeError):
        return None
    readable = isinstance(guess, int) and 1 <= guess <= HIGHEST
    return guess if readable and call["function"]["name"] == "guess" else None
