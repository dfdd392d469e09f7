"""Runs a command as if it were not run by another one: its own terminal, signals and exit code."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

NOT_FOUND, NOT_EXECUTABLE, BY_SIGNAL = 127, 126, 128
"""Exit codes of shells."""

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; 128 and the number of the signal that ended it."""
    seconds: float


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run a command and wait for its end. Signals to this process reach it, but for those that it ignores:
    the command then ignores them too, as under `nohup`.

    Raises:
        OSError: it cannot be started.
    """
    began = time.monotonic()
    # The handlers come first: a signal that arrives between them and the start of the child is not lost
    early: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if number in _FROM_TERMINAL and _is_in_foreground():
            return  # the terminal sends it to the child too; twice would end programs that ask once more
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    handled = [
        number for number in (*_FORWARDED, *_FROM_TERMINAL) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        child = subprocess.Popen(command, env=dict(environment))
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return Ended(code if code >= 0 else BY_SIGNAL - code, time.monotonic() - began)


def _is_in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
