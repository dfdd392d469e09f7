"""Rollouts folded by a key of their metadata: for each value the rewards and the turns that drifted."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenproxy.record.store import Session
from tokenproxy.samples.tree import parsed
from tokenproxy.viewer.summary import Summary

_MOST_FOLDS = 1000
_MOST_KEYS = 50


class Fold(msgspec.Struct, frozen=True):
    """The rollouts with one value of the key."""

    value: str | None
    """None for rollouts that do not have the key."""
    rollouts: int
    rewarded: int
    """Rollouts with a reward. Mean and spread are those of them; None if there is none."""
    mean: float | None
    spread: float | None
    """Standard deviation."""
    read: int
    """Rollouts whose turns were read. The two numbers of turns are those of them."""
    turns: int
    drifted: int


def texts_of(metadata: bytes) -> dict[str, str]:
    """The metadata of a session with each value as text: 7 and "7" are equal."""
    fields = parsed(metadata, dict[str, Any]) or {}
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in fields.items()
    }


def fold_table(sessions: Sequence[Session], summaries: Mapping[str, Summary], key: str) -> dict[str, Any]:
    """The folds, in the order of the first rollout of each; their number, which may be greater; the number of
    rollouts that were folded; and the keys of their metadata, the most common first.

    Args:
        summaries: by the id of the session, of those whose turns were read.
    """
    folds: dict[str | None, list[Session]] = {}
    keys = Counter[str]()
    for session in sessions:
        metadata = texts_of(session.metadata)
        keys.update(list(metadata))
        folds.setdefault(metadata.get(key), []).append(session)
    shown = list(folds.items())[:_MOST_FOLDS]
    return {
        "object": "folds",
        "data": [_fold(value, folded, summaries) for value, folded in shown],
        "folds": len(folds),
        "rollouts": len(sessions),
        "keys": [name for name, _ in keys.most_common(_MOST_KEYS)],
    }


def _fold(value: str | None, sessions: Sequence[Session], summaries: Mapping[str, Summary]) -> Fold:
    rewards = [session.rewards[""] for session in sessions if "" in session.rewards]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None
    if mean is not None:
        spread = math.sqrt(sum((each - mean) * (each - mean) for each in rewards) / len(rewards))
    read = [summaries[session.id] for session in sessions if session.id in summaries]
    turns, drifted = sum(each.turns for each in read), sum(each.drifted for each in read)
    return Fold(value, len(sessions), len(rewards), mean, spread, len(read), turns, drifted)
