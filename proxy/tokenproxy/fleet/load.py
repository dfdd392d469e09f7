"""The requests that run on one replica, and for how long it is usually silent."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_READING_KEPT = 0.9
"""Share of the earlier prompts that counts in how fast prompts are read, after another one was read."""
_GAP_HALF_LIFE_S = 60.0
"""Half-life of the longest gap: a replica that was slow an hour ago may be fast now."""


@dataclass(slots=True, eq=False)
class Lease:
    """One request that runs on a replica."""

    ids: int
    """Approximate number of ids in its prompt."""
    started: float
    """On the clock of `time.monotonic`."""
    deadline: asyncio.Timeout | None = None
    """Ends the wait for the first byte. None after the first byte was sent to the client."""
    alone: bool = True
    """Whether no other request ran on the replica at the same time."""
    last_try: bool = False
    """Whether the request may not run again if this replica fails."""
    samples: bool = False
    """Whether its engine counts tokens while it runs."""


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

    def begin(self, ids: int) -> Lease:
        """Count a request until `end`."""
        now = self.clock()
        if not self.running:
            self._progressed = now
        lease = Lease(ids, now, alone=not self.running)
        if len(self.running) == 1:  # of several none is alone any more
            next(iter(self.running)).alone = False
        self.running.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Remove a request that ended. A second call does nothing."""
        self.running.discard(lease)

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
