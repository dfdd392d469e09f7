"""The time during which new requests wait, because the fleet's weights change."""

import time
from collections.abc import Callable


class Hold:
    """Whether requests are held back now, and for how long they were until now. One per fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._before = 0.0
        """Seconds of earlier holds."""

    @property
    def active(self) -> bool:
        """Whether requests are held back."""
        return self._since is not None

    def seconds(self) -> float:
        """Seconds of all holds until now. It does not grow while requests are not held back.

        The difference of two values is the part of the time between them that must not count as a timeout.
        """
        running = 0.0 if self._since is None else self._clock() - self._since
        return self._before + running

    def begin(self) -> None:
        """Hold requests back. Does nothing if they are."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> float:
        """Release requests; returns for how many seconds they were held back."""
        if self._since is None:
            return 0.0
        seconds = self._clock() - self._since
        self._before += seconds
        self._since = None
        return seconds
