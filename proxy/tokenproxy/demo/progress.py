"""Report progress at intervals, so that a long wait does not look like a hang."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL_S = 2.0


def progress(line: str) -> None:
    """Print one progress line to stderr, unbuffered; stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def heartbeat(label: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Report `label (N s) detail` every 2 seconds while the `with` block runs.

    A block that ends within the first interval reports nothing. `detail` is called in the heartbeat's thread.
    """
    done = threading.Event()

    def beat() -> None:
        started = time.monotonic()
        while not done.wait(_INTERVAL_S):
            progress(f"{label} ({time.monotonic() - started:.0f} s) {detail()}".rstrip())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
