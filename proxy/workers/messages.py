"""What the parent and its workers send each other, over one pipe for each worker."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker."""

    worker: int
    """Its number, from 1; a worker that replaces another one gets its number."""
    settings: Settings
    sockets: tuple[int, ...]
    """File descriptors of the sockets that all workers listen on."""
    metrics: Path
    """Folder with the metrics of all workers."""


class Command(StrEnum):
    """A later message to a worker."""

    STOP = "stop"
    """Drain, as after a first signal."""
    CUT = "cut"
    """Cut the requests that still run, as after a second signal."""


STARTED = "started"
"""The message of a worker once it accepts connections."""

END_S = 15.0
"""Seconds after `stop_delay_s` and `drain_s` in which a worker must have cut its requests and ended."""
