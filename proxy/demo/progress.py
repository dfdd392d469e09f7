"""Report progress at intervals, so that a long wait does not look like a hang."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

Progress = Callable[[str], None]

INTERVAL_S = 2.0


def print_progress(line: str) -> None:
    """Print one progress line to stderr, unbuffered; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters: `shorten("abcdefg", 6)` is `"abcde…"`."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Heartbeat:
    """Reports `label (N s) detail` every `interval_s` seconds while the `with` block runs.

    A block that ends within the first interval reports nothing. `detail` is called in the heartbeat's thread.
    """

    def __init__(
        self,
        progress: Progress,
        label: str,
        detail: Callable[[], str] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._progress = progress
        self._label = label
        self._detail = detail
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        started = time.monotonic()
        while not self._done.wait(self._interval_s):
            detail = self._detail() if self._detail else ""
            line = f"{self._label} ({time.monotonic() - started:.0f} s) {detail}"
            self._progress(line.rstrip())
