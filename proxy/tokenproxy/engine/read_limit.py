"""How long an engine may take to send its response."""

GRACE_S = 5.0
SLOWEST = 20_000
"""Bytes per second, after GRACE_S, of what an engine sends in one piece: a whole body, or one event."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class ReadLimit:
    """How long the next bytes of a body may take.

    A stream may pause between two events. An event, or a body that is not a stream, must arrive at a minimum
    rate; an engine that is slower counts as broken. Only time spent waiting for the engine counts, not the
    time that a slow client takes.
    """

    def __init__(self, stream: bool, idle_timeout_s: float | None) -> None:
        self._stream = stream
        self._idle_timeout_s = idle_timeout_s
        self._between = stream
        """Whether the last bytes ended an event."""
        self._bytes = 0
        self._waited_s = 0.0
        self._last = b""
        """The last four bytes: the end of an event may arrive in two pieces."""

    def seconds(self) -> float | None:
        """Seconds to wait for the next bytes; None for no limit."""
        if self._between:
            return self._idle_timeout_s
        return max(0.0, GRACE_S + self._bytes / SLOWEST - self._waited_s)

    def received(self, chunk: bytes, waited_s: float) -> None:
        """Take note of bytes that arrived after a wait of `waited_s` seconds."""
        if self._stream and chunk.endswith(_EVENT_ENDS):  # nearly always
            self._between, self._last = True, chunk[-4:]
            self._bytes, self._waited_s = len(chunk), 0.0
            return
        ended = self._stream and any(self._ends(end, chunk) for end in _EVENT_ENDS)
        self._last = (self._last + chunk[-4:])[-4:]
        if ended:
            self._between = self._last.endswith(_EVENT_ENDS)
            self._bytes, self._waited_s = 0, 0.0  # of the event that began in this chunk
        elif self._between:
            self._between = False
        else:
            self._waited_s += waited_s
        self._bytes += len(chunk)

    def _ends(self, end: bytes, chunk: bytes) -> bool:
        """Whether a chunk completes an event that ends with `end`."""
        part = len(end) - 1
        return end in chunk or end in self._last[-part:] + chunk[:part]
