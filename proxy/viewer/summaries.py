"""What the list of sessions shows of one session: counts over its turns."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from proxy.history.turn import Turn
from proxy.samples.classes import UNKNOWN, classes_of
from proxy.viewer.breaks import breaks_of

Counts = tuple[tuple[str, int], ...]
"""How many turns have a word, the most frequent first."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts over the turns of a session. Small, because an index holds one for each of 100,000 sessions."""

    models: tuple[str, ...]
    reasons: Counts
    problems: Counts
    classes: Counts
    """Turns without a class count as `UNKNOWN`."""
    weight_versions: tuple[str, ...]
    leaves: int
    """Turns that no turn continues."""
    aborted: int
    ids: int
    """The longest prompt with its completion."""
    sampled: int
    """Sampled ids of all turns."""
    drift: int
    """Turns whose prompt holds other ids than an earlier turn that it continues: see `breaks_of`."""


def summarize(turns: Sequence[Turn]) -> Summary:
    """The summary of a session, given all its turns."""
    continued = {turn.parent for turn in turns}
    return Summary(
        models=_words(turn.model for turn in turns),
        reasons=_counts(turn.reason for turn in turns),
        problems=_counts(turn.problem for turn in turns),
        classes=_counts(found or UNKNOWN for found in classes_of(turns).values()),
        weight_versions=_words(span.version for turn in turns for span in turn.weight_versions),
        leaves=sum(turn.id not in continued for turn in turns),
        aborted=sum(turn.aborted for turn in turns),
        ids=max((turn.prompt_tokens + turn.completion_tokens for turn in turns), default=0),
        sampled=sum(turn.completion_tokens for turn in turns),
        drift=sum(found.drifted for found in breaks_of(turns).values()),
    )


def summary_row(summary: Summary) -> dict[str, Any]:
    """A summary as the page reads it."""
    return {
        "models": summary.models,
        "reasons": dict(summary.reasons),
        "problems": dict(summary.problems),
        "classes": dict(summary.classes),
        "weight_versions": summary.weight_versions,
        "leaves": summary.leaves,
        "aborted": summary.aborted,
        "ids": summary.ids,
        "sampled": summary.sampled,
        "drift": summary.drift,
    }


def _words(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(sys.intern, dict.fromkeys(map(str, words))))


def _counts(words: Iterable[str]) -> Counts:
    return tuple((sys.intern(str(word)), count) for word, count in Counter(words).most_common() if word)
