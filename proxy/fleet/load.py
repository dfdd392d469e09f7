"""The running requests of one replica, and how fast it serves them."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.fleet.pace import Pace, work_of

_HALF_LIFE_S = 60.0
"""Half-life of a measurement in seconds: a replica that was slow an hour ago may be fast now."""


@dataclass(slots=True, eq=False)
class Lease:
    """One request that runs on a replica."""

    ids: int
    """Approximate number of ids in its prompt."""
    started: float
    """On the clock of `time.monotonic`."""
    deadline: asyncio.Timeout | None = None
    """Ends the wait for the first byte. None after the first byte was sent to the client."""
    to_read: int = 0
    """Estimated number of its prompt's ids that are not in the replica's prefix cache."""
    last_try: bool = False
    """Whether the request may not run again if this replica fails."""


@dataclass(slots=True)
class _Decayed:
    """A sum with exponential decay over time."""

    value: float = 0.0
    at: float = -math.inf

    def add(self, value: float, now: float) -> None:
        self.value = self.read(now) + value
        self.at = now

    def read(self, now: float) -> float:
        return self.value * 0.5 ** ((now - self.at) / _HALF_LIFE_S) if self.value else 0.0


@dataclass(slots=True)
class Load:
    """The requests that run on one replica."""

    clock: Callable[[], float] = time.monotonic
    running: set[Lease] = field(default_factory=set)
    pace: Pace = field(init=False)
    slowest_gap_s: float = 0.0
    """The longest recent time between two signs of progress."""
    responded: bool = False
    """Whether the replica served a prompt since it was started; the first one may take it very long."""
    _progressed: float = -math.inf
    """When the replica last sent an event or a body, or took a request after a pause."""
    _seconds: _Decayed = field(default_factory=_Decayed)
    _ids_served: _Decayed = field(default_factory=_Decayed)

    def __post_init__(self) -> None:
        self.pace = Pace(self.clock)

    @property
    def requests(self) -> int:
        """How many requests run."""
        return len(self.running)

    def begin(self, ids: int) -> Lease:
        """Count a request until `end`."""
        now = self.clock()
        if not self.running:
            self._progressed = now
        lease = Lease(ids, now)
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

    def restart(self) -> None:
        """Forget the silence until now: the replica was paused."""
        self._progressed = self.clock()

    def shift(self, seconds: float) -> None:
        """Leave a pause that ended now out of all measurements.

        Args:
            seconds: how long it was.
        """
        now = self.clock()
        for lease in self.running:
            lease.started += min(seconds, max(0.0, now - lease.started))
        self.restart()

    def answered(self, lease: Lease) -> None:
        """Measure how fast the replica reads prompts, when the first byte of a response arrives."""
        now = self.clock()
        lease.deadline = None
        if lease.ids:
            self.responded = True
            self._seconds.add(now - lease.started, now)
            self._ids_served.add(lease.ids, now)
        self.progress()

    def completed(self, lease: Lease, completion_ids: int) -> None:
        """Measure the replica's pace, when the whole response arrived."""
        self.pace.measure(self.clock() - lease.started, work_of(completion_ids, lease.to_read))

    def progress(self) -> None:
        """Take note that the replica sent a whole event or body."""
        now = self.clock()
        gap = now - self._progressed
        self.slowest_gap_s = max(gap, self.slowest_gap_s * 0.5 ** (gap / _HALF_LIFE_S))
        self._progressed = now

    def silent_s(self) -> float:
        """Seconds since the last progress; 0 if nothing runs."""
        return self.clock() - self._progressed if self.running else 0.0

    def seconds_per_id(self) -> float:
        """Recent seconds from a request to its first byte, for each id of its prompt; 0 if not measured."""
        now = self.clock()
        ids = self._ids_served.read(now)
        return self._seconds.read(now) / ids if ids > 0 else 0.0

    def unread_prompts(self) -> tuple[int, int]:
        """Ids of the longest prompt whose answer has not begun, and of all such prompts."""
        unread = [lease.ids for lease in self.running if lease.deadline is not None]
        return max(unread, default=0), sum(unread)
