from dataclasses import dataclass

import pytest


@dataclass
class Clock:
    """Shows the time that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
