"""Says that something is still going on, so that no wait looks like a hang."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

Say = Callable[[str], None]

INTERVAL_S = 2.0


def say_stderr(line: str) -> None:
    """Print one progress line to stderr at once; stdout stays free for results."""
    print(line, file=sys.stderr, flush=True)


def shorten(text: str, limit: int) -> str:
    """The first `limit` characters of `text`, the last one an ellipsis where something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Heartbeat:
    """Says `label (N s) detail` every `interval_s` seconds while the `with` block runs.

    Nothing is said about a block that ends within the first interval. `detail` is called in the
    heartbeat's thread.
    """

    def __init__(
        self,
        say: Say,
        label: str,
        detail: Callable[[], str] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._say = say
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
            self._say(line.rstrip())
