"""What `/ready` tells of the store."""

from typing import Literal

import msgspec


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the store of one process does."""

    state: Literal["ok", "stalled", "unavailable"]
    """`stalled`: it does not respond in time, or another process holds its lock; `unavailable`: it fails."""
    since: float | None
    """When that began, in seconds since the epoch; None if all is well."""
    error: str | None
    """Message of the last error."""
    queued_turns: int
    """Turns that wait to be recorded."""
    lost_turns: int
    """Turns that were never recorded, since the process started."""
