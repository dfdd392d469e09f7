"""The list of sessions as the page reads it: the most recently used first, page by page, with a search.

A page is read from the store for each request: nothing is kept between requests.
"""

import math
from typing import Any

import msgspec

from tokenproxy.record.store import Session, Store, session_id
from tokenproxy.samples.tree import parsed
from tokenproxy.samples.turn_json import session_fields, stored_json

_SEARCHED = 1000
"""Sessions that a search reads from the store at a time."""
_MOST_SEARCHED = 5000
"""Sessions that one request searches. The next page goes on with older ones."""


async def list_sessions(
    store: Store, tenant: str, search: str, before: float, limit: int
) -> tuple[list[Session], Session | None]:
    """Sessions of a tenant that are found by a search.

    Args:
        search: a part of the name, or of `KEY=VALUE` of the metadata, in any case; empty for all. The session
            with exactly this name is on the first page, however long ago it was used.
        before: only those with a smaller `used`; infinite for the first page.

    Returns:
        at most `limit` sessions and that one, and the session after which the next page begins; None if there
        is no more.
    """
    found: list[Session] = []
    if search and math.isinf(before):
        exact = await store.session(session_id(tenant, search))
        found += [exact] if exact is not None and exact.tenant == tenant else []
    size = _SEARCHED if search else limit
    for _ in range(_MOST_SEARCHED // _SEARCHED):
        page = await store.sessions(limit=size, tenant=tenant, before=before)
        for session in page:
            if not search or (session.name != search and search.lower() in _searched(session)):
                found.append(session)
            if len(found) >= limit:
                return found, session
        if len(page) < size:
            return found, None
        before = page[-1].used
    return found, page[-1]


def describe(session: Session, reward: float | None) -> dict[str, Any]:
    """A session without its turns."""
    return {
        **session_fields(session),
        "metadata": stored_json(session.metadata, b"{}"),
        "reward": reward,
    }


def _searched(session: Session) -> str:
    """The text in which a search looks, in lower case."""
    metadata = parsed(session.metadata, dict[str, Any]) or {}
    pairs = (
        f"{key}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
        for key, value in metadata.items()
    )
    return "\n".join([session.name, *pairs]).lower()
