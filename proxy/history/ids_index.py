"""Finds the recorded turn that a prompt of ids continues, whatever its text: the longest one wins.

The index cannot hold a key for each id of a turn. So a turn is under one key: the digest of its ids up to a
*mark*, the largest number of a fixed sequence (1, 2, ... 64, 68, ... 256, 272, ...) that it has. A prompt is
looked up under the digests of all its marks, the longest first, and each turn found is compared with it. The
sequence is dense where turns are short, so that few turns share a key without having equal ids.

A second key is the digest of all ids of a turn. It tells whether several rollouts hold these ids.
"""

from collections.abc import Iterator

from proxy.history.cached_turn import CachedTurn
from proxy.history.matcher import Match, Matcher, pack_prompt
from proxy.history.scope import Scope
from proxy.history.store import Found, IndexEntry

_STEPS = ((1024, 64), (256, 16), (64, 4), (0, 1))
"""Length from which marks are multiples of a step, and the step."""
_LOOKUP = 192
"""Number of keys in one lookup."""
_PREFIX, _WHOLE = "ids-prefix", "ids-whole"


def ids_entries(scope: Scope, ids: bytes, ids_digest: bytes) -> list[IndexEntry]:
    """The index entries by which prompts of ids find a turn.

    Args:
        ids: the turn's prompt and completion, packed.
        ids_digest: as `Turn.ids_digest`.
    """
    prefix = scope.hasher(_PREFIX)
    prefix.update(memoryview(ids)[: 4 * _last_mark(len(ids) // 4)])
    return [IndexEntry(prefix.digest()), IndexEntry(_whole_key(scope, ids_digest), ids_digest)]


async def match_ids(matcher: Matcher, prompt: bytes, scope: Scope, rollout: str | None = None) -> Match:
    """The recorded turn with the most ids that a prompt begins with.

    Args:
        prompt: a compact JSON array of ids.
        rollout: only turns of this rollout; None for all in the scope.

    Raises:
        StoreError: the store does not respond.
    """
    keys = prefix_keys(scope, pack_prompt(prompt))
    for start in range(0, len(keys), _LOOKUP):
        part = keys[start : start + _LOOKUP]
        found = await matcher.store.find(part, rollout or scope.rollout)
        for key in part:
            turn = await _longest(matcher, found.get(key), prompt, rollout)
            if turn is None:
                continue
            digest: bytes = turn.hasher.digest()
            return Match(turn, shared=None if rollout else (_whole_key(scope, digest), digest))
    return Match()


async def _longest(
    matcher: Matcher, found: Found | None, prompt: bytes, rollout: str | None
) -> CachedTurn | None:
    candidates = [each for group in found.groups for each in group.candidates] if found else []
    return await matcher.longest_of(
        [each.turn for each in candidates if rollout in (None, each.rollout)], prompt
    )


def _whole_key(scope: Scope, ids_digest: bytes) -> bytes:
    return scope.key(_WHOLE, ids_digest)


def prefix_keys(scope: Scope, ids: bytes) -> list[bytes]:
    """The keys of all marks of packed ids, the longest first."""
    hasher, done, keys = scope.hasher(_PREFIX), 0, list[bytes]()
    view = memoryview(ids)
    for mark in marks(len(ids) // 4):
        hasher.update(view[4 * done : 4 * mark])
        done = mark
        keys.append(hasher.copy().digest())
    return keys[::-1]


def _step(count: int) -> int:
    return next(step for length, step in _STEPS if count >= length)


def _last_mark(count: int) -> int:
    """The largest mark that is at most `count`."""
    return count - count % _step(count)


def marks(count: int) -> Iterator[int]:
    """Yield all marks from 1 to `count`."""
    mark = 1
    while mark <= count:
        yield mark
        mark += _step(mark)
