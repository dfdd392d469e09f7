"""Rollouts folded by a key of their metadata: for each value the rewards and the turns that drifted."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenproxy.record.store import Session
from tokenproxy.samples.tree import parsed
from tokenproxy.viewer.summary import Summary

_MOST_FOLDS = 1000
_MOST_KEYS = 50


class Rollout(NamedTuple):
    """What a fold needs of a rollout."""

    metadata: Mapping[str, str]
    """See `texts_of`."""
    reward: float | None
    summary: Summary | None
    """None if its turns were not read."""


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


def rollouts_of(sessions: Iterable[Session], summaries: Mapping[str, Summary]) -> list[Rollout]:
    """What `fold_table` takes; `summaries` by the id of the session."""
    return [
        Rollout(texts_of(each.metadata), each.rewards.get(""), summaries.get(each.id)) for each in sessions
    ]


def fold_table(rollouts: Sequence[Rollout], key: str) -> dict[str, Any]:
    """The folds, in the order of the first rollout of each; their number, which may be greater; the number of
    rollouts that were folded; and the keys of their metadata, the most common first.
    """
    folds: dict[str | None, list[Rollout]] = {}
    for rollout in rollouts:
        folds.setdefault(rollout.metadata.get(key), []).append(rollout)
    keys = Counter(name for rollout in rollouts for name in rollout.metadata)
    shown = list(folds.items())[:_MOST_FOLDS]
    return {
        "object": "folds",
        "data": [_fold(value, folded) for value, folded in shown],
        "folds": len(folds),
        "rollouts": len(rollouts),
        "keys": [name for name, _ in keys.most_common(_MOST_KEYS)],
    }


def _fold(value: str | None, rollouts: Sequence[Rollout]) -> Fold:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None
    if mean is not None:
        spread = math.sqrt(sum((each - mean) * (each - mean) for each in rewards) / len(rewards))
    read = [rollout.summary for rollout in rollouts if rollout.summary is not None]
    turns, drifted = sum(each.turns for each in read), sum(each.drifted for each in read)
    return Fold(value, len(rollouts), len(rewards), mean, spread, len(read), turns, drifted)
