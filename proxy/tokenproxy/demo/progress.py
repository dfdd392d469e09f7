"""Report progress at intervals, so that a long wait does not look like a hang."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]

INTERVAL_S = 2.0


def print_progress(line: str) -> None:
    """Print one progress line to stderr, unbuffered; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def shorten(text: str, limit: int) -> str:
    """The text, cut to `limit` characters: `shorten("abcdefg", 6)` is `"abcde…"`."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def heartbeat(
    progress: Progress, label: str, detail: Callable[[], str] = str, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """Report `label (N s) detail` every `interval_s` seconds while the `with` block runs.

    A block that ends within the first interval reports nothing. `detail` is called in the heartbeat's thread.
    """
    done = threading.Event()

    def beat() -> None:
        started = time.monotonic()
        while not done.wait(interval_s):
            progress(f"{label} ({time.monotonic() - started:.0f} s) {detail()}".rstrip())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
