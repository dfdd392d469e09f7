"""How the store of one process does, for people."""

from typing import Literal

import msgspec

from tokenproxy.record.store import StoreError, StoreStalled, Unreadable
from tokenproxy.store.backlog import Backlog

_NAMED = 16
"""Damaged records that `/ready` names."""


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the store of one process does: a part of `/ready`."""

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
    unreadable: int
    """Damaged records that were left out since the process started; the log names them."""
    unreadable_turns: list[str]
    """The ids of the first turns among them."""
    unreadable_records: list[str]
    """The first of the others, as `session NAME`, without their tenants."""

    @classmethod
    def of(
        cls, error: StoreError | None, since: float | None, backlog: Backlog, unreadable: Unreadable
    ) -> "StoreHealth":
        """The health of a store. `error`: the last one; None if all is well."""
        names = [name.partition(" ") for name in unreadable.names]
        turns = [name for kind, _, name in names if kind == "turn"]
        others = [f"{kind} {name.rpartition('/')[2]}" for kind, _, name in names if kind != "turn"]
        failing: Literal["stalled", "unavailable"]
        failing = "stalled" if isinstance(error, StoreStalled) else "unavailable"
        return cls(
            state="ok" if error is None else failing,
            since=since,
            error=None if error is None else str(error),
            queued_turns=len(backlog.turns()),
            lost_turns=backlog.lost,
            unreadable=len(names),
            unreadable_turns=turns[:_NAMED],
            unreadable_records=others[:_NAMED],
        )
