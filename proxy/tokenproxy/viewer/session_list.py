"""The list of sessions as the page reads it: the most recently used first, page by page, with a search.

A page is read from the store for each request: nothing is kept between requests.
"""

import asyncio
import math
from typing import Any

import msgspec

from tokenproxy.record.store import Session, Store, session_id
from tokenproxy.samples.feed import metadata_matches
from tokenproxy.samples.turn_json import session_fields, stored_json
from tokenproxy.viewer.folds import texts_of
from tokenproxy.viewer.summary import Summary, mentions

_SEARCHED = 1000
"""Sessions that a search reads from the store at a time."""
MOST_SEARCHED = 5000
"""Sessions that one request searches. The next page goes on with older ones."""
MOST_FOLDED = 20_000
"""Sessions that one request folds."""
_READ_BYTES = 128 * 2**20
"""Of turns, as the store keeps them, that one request searches."""


class Search(msgspec.Struct, frozen=True):
    """Which sessions a page wants: those that fulfil all of these."""

    words: str = ""
    """A part of the name, or of `KEY=VALUE` of the metadata, in any case."""
    messages: bool = False
    """Whether the words may also be a part of a message. Such a search reads turns, and ends where they are
    more than `_READ_BYTES`."""
    where: tuple[str, ...] = ()
    """What the metadata must hold, as `metadata_matches` takes it."""


async def list_sessions(
    store: Store, tenant: str, search: Search, before: float, limit: int, most: int = MOST_SEARCHED
) -> tuple[list[Session], Session | None]:
    """Sessions of a tenant that are found by a search.

    Args:
        search: the session with exactly this name is on the first page, however long ago it was used.
        before: only those with a smaller `used`; infinite for the first page.
        most: how many sessions are read at most.

    Returns:
        at most `limit` sessions and that one, and the session after which the next page begins; None if there
        is no more.
    """
    found: list[Session] = []
    if search.words and math.isinf(before):
        exact = await store.session(session_id(tenant, search.words))
        if exact is not None and exact.tenant == tenant and metadata_matches(exact.metadata, search.where):
            found.append(exact)
    size = min(limit, _SEARCHED) if search == Search() else _SEARCHED
    left, last = _READ_BYTES, None
    for _ in range(math.ceil(most / size)):
        page = await store.sessions(limit=size, tenant=tenant, before=before)
        await asyncio.sleep(0)  # a store in memory never waits
        for session in page:
            if metadata_matches(session.metadata, search.where):
                left -= session.size if search.messages else 0
                if left < 0 and last is not None:
                    return found, last
                if await _has_words(store, session, search):
                    found.append(session)
            last = session
            if len(found) >= limit:
                return found, last
        if len(page) < size:
            return found, None
        before = page[-1].used
    return found, last


def describe(session: Session, reward: float | None, summary: Summary | None) -> dict[str, Any]:
    """A session without its turns; `summary` is None while its turns are not read."""
    return {
        **session_fields(session),
        "metadata": stored_json(session.metadata, b"{}"),
        "reward": reward,
        "summary": summary,
    }


async def _has_words(store: Store, session: Session, search: Search) -> bool:
    if not search.words:
        return True
    if session.name == search.words:
        return False  # it is on the first page
    words = search.words.lower()
    pairs = [f"{key}={value}" for key, value in texts_of(session.metadata).items()]
    if words in "\n".join([session.name, *pairs]).lower():
        return True
    return search.messages and await asyncio.to_thread(mentions, await store.turns(session.id), words)
