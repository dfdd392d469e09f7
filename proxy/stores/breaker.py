"""When calls to a store are skipped, and when it is tried again."""

import random
import time

FAILURES = 3
"""Calls that fail in a row before others are skipped."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 3.0
_FORGIVEN_AFTER_S = 30.0
"""A store that worked for so long is tried again soon, however often it failed before."""


class Breaker:
    """Counts the failures in a row of one kind of call: open from the third until one succeeds."""

    def __init__(self) -> None:
        self._failures = 0

    @property
    def open(self) -> bool:
        """Whether calls are skipped."""
        return self._failures >= FAILURES

    def fail(self) -> None:
        """A call failed."""
        self._failures += 1

    def succeed(self) -> None:
        """A call succeeded."""
        self._failures = 0


class Backoff:
    """The waits between two trials: each twice as long as the one before, with a random part."""

    def __init__(self, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._wait = 0.0
        self._healthy_since = 0.0

    def start(self) -> float:
        """The wait before the first trial: none, unless the store failed again soon after it recovered."""
        if time.monotonic() - self._healthy_since > _FORGIVEN_AFTER_S:
            self._wait = 0.0
        return self._wait

    def next(self) -> float:
        """The wait after a trial that failed."""
        self._wait = min(max(2 * self._wait, self._first_s), self._longest_s)
        return self._wait * random.uniform(0.5, 1.0)

    def recovered(self) -> None:
        """The store works."""
        self._healthy_since = time.monotonic()
