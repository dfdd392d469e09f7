"""How a SQLite store reads sessions."""

from collections.abc import Sequence
from typing import Any

from proxy.history.store import Session

SESSION_COLUMNS = """
sessions.id, sessions.tenant, explicit, ambiguous, created, used, sessions.turns, size, defaults, overrides,
metadata
"""
SESSIONS = f"""
SELECT {SESSION_COLUMNS} FROM sessions LEFT JOIN descriptions ON descriptions.id = sessions.id
"""


def session_from(row: Sequence[Any]) -> Session:
    """A session from a row of SESSION_COLUMNS."""
    rollout, tenant, explicit, ambiguous, created, used, turns, size, defaults, overrides, metadata = row
    return Session(
        id=rollout,
        tenant=tenant,
        explicit=bool(explicit),
        ambiguous=bool(ambiguous),
        created=created,
        used=used,
        turns=turns,
        size=size,
        defaults=b"{}" if defaults is None else defaults,
        overrides=b"{}" if overrides is None else overrides,
        metadata=b"{}" if metadata is None else metadata,
    )
