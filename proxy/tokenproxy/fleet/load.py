"""The requests that run on one replica, for how long it is usually silent, and its circuit breaker.

A circuit breaker counts failures:

    CLOSED --failures in a row--> OPEN --time passes--> HALF_OPEN --success--> CLOSED
                                   ^                        |
                                   +-------- failure -------+

A replica whose breaker is open gets no requests. Each time the breaker opens again, it stays open for twice
as long. Half open, it lets one request at a time through. (M. Nygard, Release It!, 2nd ed., 2018, chapter 5;
the growing time is that of Envoy's outlier detection.)
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

_READING_KEPT = 0.9
"""Share of the earlier prompts that counts in how fast prompts are read, after another one was read."""
_GAP_HALF_LIFE_S = 60.0
"""Half-life of the longest gap: a replica that was slow an hour ago may be fast now."""
FAILURES = 3
"""Failures in a row that open the breaker."""
FIRST_OPEN_S = 5.0
LONGEST_OPEN_S = 300.0
FORGIVEN_AFTER_S = 600.0
"""Seconds without a failure after which the next opening counts as the first."""


@dataclass(slots=True, eq=False)
class Lease:
    """One request that runs on a replica."""

    ids: int
    """Approximate number of ids in its prompt."""
    samples: bool = False
    """Whether its engine counts tokens while it runs."""
    started: float = 0.0
    """On the clock of `time.monotonic`; `Load.begin` sets it."""
    deadline: asyncio.Timeout | None = None
    """Ends the wait for the first byte. None after the first byte was sent to the client."""
    alone: bool = True
    """Whether no other request ran on the replica at the same time."""
    last_try: bool = False
    """Whether the request may not run again if this replica fails."""


@dataclass(slots=True)
class Load:
    """The requests that run on one replica."""

    clock: Callable[[], float] = time.monotonic
    running: set[Lease] = field(default_factory=set)
    slowest_gap_s: float = 0.0
    """The longest recent time between two signs of progress."""
    responded: bool = False
    """Whether the replica served a prompt since it was started; the first one may take it very long."""
    _progressed: float = -math.inf
    """When the replica last sent an event or a body, or took a request after a pause."""
    _read_s: float = 0.0
    """Seconds from recent requests to their first bytes, and the ids of their prompts."""
    _read_ids: float = 0.0

    @property
    def requests(self) -> int:
        """How many requests run."""
        return len(self.running)

    def begin(self, lease: Lease) -> None:
        """Count a request until it is removed from `running`."""
        lease.started, lease.alone = self.clock(), not self.running
        if lease.alone:
            self._progressed = lease.started
        elif len(self.running) == 1:  # of several none is alone any more
            next(iter(self.running)).alone = False
        self.running.add(lease)

    def give_up(self, now: float, *, gone: bool) -> None:
        """End the wait of requests without a first byte, so that they can run on another replica.

        Args:
            now: on the clock of the event loop.
            gone: whether nothing can come any more. If not, and the replica never responded, requests stay
                that may not run again.
        """
        for lease in list(self.running):
            if lease.last_try and not (gone or self.responded):
                continue
            if lease.deadline is not None and not lease.deadline.expired():
                lease.deadline.reschedule(now)
                lease.deadline = None

    def shift(self, seconds: float) -> None:
        """Leave a pause that ended now out of all measurements.

        Args:
            seconds: how long it was; 0 if that is unknown, so that only the silence is forgotten.
        """
        self._progressed = now = self.clock()
        for lease in self.running:
            lease.started += min(seconds, max(0.0, now - lease.started))

    def answered(self, lease: Lease) -> None:
        """Measure how fast the replica reads prompts, when the first byte of a response arrives."""
        lease.deadline = None
        if lease.ids:
            self.responded = True
            self._read_s = _READING_KEPT * self._read_s + self.clock() - lease.started
            self._read_ids = _READING_KEPT * self._read_ids + lease.ids
        self.progress()

    def progress(self) -> None:
        """Take note that the replica sent a whole event or body."""
        now = self.clock()
        gap = now - self._progressed
        self.slowest_gap_s = max(gap, self.slowest_gap_s * 0.5 ** (gap / _GAP_HALF_LIFE_S))
        self._progressed = now

    def silent_s(self) -> float:
        """Seconds since the last progress; 0 if no request runs that samples."""
        samples = any(lease.samples for lease in self.running)
        return self.clock() - self._progressed if samples else 0.0

    def usual_silence_s(self) -> float:
        """The longest silence that is usual for the requests that run.

        It is the longest recent one, or the time to read the longest prompt whose answer has not begun.
        """
        longest = max((lease.ids for lease in self.running if lease.deadline is not None), default=0)
        prompt_s = longest * self._read_s / self._read_ids if self._read_ids else 0.0
        return max(self.slowest_gap_s, prompt_s)


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
        self.trial: object | None = None
        """The request that decides whether it closes, while it is half open."""

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

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self._opened_at is None or (self.trial is None and self.opens_for_s() == 0)

    def started(self, request: object) -> None:
        """Take note that a request is sent; half open, it is the trial, unless another one is."""
        if self._opened_at is not None and self.allows:
            self.trial = request

    def ended(self, request: object) -> None:
        """Take note that a request ended. If it was an undecided trial, the next request is the trial."""
        if self.trial is request:
            self.trial = None

    def reset(self) -> None:
        """Close the breaker, because the engine was restarted."""
        self._failures, self.trial, self._opened_at = 0, None, None

    def succeeded(self) -> None:
        """Take note of a response. While the breaker is open, late responses are ignored."""
        if self._opened_at is None:
            self._failures = 0
        elif self.state is BreakerState.HALF_OPEN:
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
        self.trial = None
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
        self._failures, self.trial, self.reason = 0, None, reason
