"""A circuit breaker: judges a replica by its responses to requests, independent of its `/health`.

    CLOSED --failures in a row--> OPEN --time passes--> HALF_OPEN --success--> CLOSED
                                   ^                        |
                                   +-------- failure -------+

A replica whose breaker is open gets no requests. Each time the breaker opens again, it stays open for twice
as long. Half open, it lets one request at a time through. (M. Nygard, Release It!, 2nd ed., 2018, chapter 5;
the growing time is that of Envoy's outlier detection.)
"""

import random
import time
from collections.abc import Callable
from enum import StrEnum

FAILURES = 3
"""Failures in a row that open the breaker."""
FIRST_OPEN_S = 5.0
LONGEST_OPEN_S = 300.0
FORGIVEN_AFTER_S = 600.0
"""Seconds without a failure after which the next opening counts as the first."""


class BreakerState(StrEnum):
    """Whether a replica gets requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit breaker of one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        """The failure that opened it."""
        self._clock = clock
        self._failures = 0
        self._open_s = 0.0
        self._opened_at: float | None = None
        self._last_opened: float | None = None
        self._trial: object | None = None
        self._trial_began = 0.0

    @property
    def state(self) -> BreakerState:
        """Its state now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.opens_for_s() > 0 else BreakerState.HALF_OPEN

    def opens_for_s(self) -> float:
        """Seconds until an open breaker lets a trial through; 0 if it lets requests through now."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._open_s - self._clock())

    def trial_s(self) -> float:
        """Seconds since the trial began; 0 if none runs."""
        return self._clock() - self._trial_began if self.on_trial else 0.0

    @property
    def on_trial(self) -> bool:
        """Whether a trial runs."""
        return self._trial is not None

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self.on_trial)

    def started(self, request: object) -> None:
        """Take note that a request is sent; half open, it is the trial, unless another one is."""
        if self.state is BreakerState.HALF_OPEN and self._trial is None:
            self._trial, self._trial_began = request, self._clock()

    def ended(self, request: object) -> None:
        """Take note that a request ended. If it was an undecided trial, the next request is the trial."""
        if self._trial is request:
            self._trial = None

    def reset(self) -> None:
        """Close the breaker, because the engine was restarted."""
        self._failures, self._trial, self._opened_at = 0, None, None

    def succeeded(self) -> None:
        """Take note of a response. While the breaker is open, late responses are ignored."""
        if self.state is not BreakerState.OPEN:
            self.reset()

    def failed(self, reason: str, *, may_open: bool) -> bool:
        """Take note of a failed request; returns whether that opened the breaker.

        Args:
            reason: the failure, for logs and `/ready`.
            may_open: False if no other replica could take the requests: the last one stays in use.
        """
        state = self.state
        if state is BreakerState.OPEN:
            return False  # the request was sent before the breaker opened
        self._trial = None
        self._failures += 1
        if not may_open or not (state is BreakerState.HALF_OPEN or self._failures >= FAILURES):
            return False
        self.open(reason)
        return True

    def open(self, reason: str) -> None:
        """Open the breaker, for twice as long as the last time, unless that was long ago."""
        now = self._clock()
        if self._last_opened is None or now - self._last_opened > FORGIVEN_AFTER_S + self._open_s:
            self._open_s = 0.0
        self._last_opened = now
        self._open_s = min(max(2 * self._open_s, FIRST_OPEN_S), LONGEST_OPEN_S)
        # spread the trials of proxies that share replicas
        self._opened_at = now + random.uniform(0, self._open_s / 10)
        self._failures, self._trial, self.reason = 0, None, reason
