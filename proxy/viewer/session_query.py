"""Which sessions the list shows, and in which order; pure work over the entries of an index."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from proxy.samples.feed import metadata_matches
from proxy.viewer.summaries import Counts, Summary

_REWARDS = 1000
"""The most rewards that the plot gets."""
_BUCKETS = 48
"""Bars of the plot of reasons."""


class Entry(msgspec.Struct, gc=False):
    """A session of an index."""

    id: str
    """In the store."""
    name: str
    """What clients know."""
    explicit: bool
    ambiguous: bool
    created: float
    used: float
    turns: int
    size: int
    metadata: bytes
    summary: Summary | None = None
    """None until its turns were read."""
    reward: float | None = None


class Sort(StrEnum):
    """What the list is ordered by."""

    USED = "used"
    CREATED = "created"
    ID = "id"
    TURNS = "turns"
    IDS = "ids"
    SAMPLED = "sampled"
    REWARD = "reward"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The conditions, all of which a session must meet, and the order."""

    search: str = ""
    """A part of its name, or of `KEY=VALUE` of its metadata, in any case."""
    model: str = ""
    reason: str = ""
    problem: str = ""
    request_class: str = ""
    weight_version: str = ""
    metadata: tuple[str, ...] = ()
    """As `FeedFilter.metadata`."""
    reward_min: float | None = None
    reward_max: float | None = None
    rewarded: bool | None = None
    drift: bool | None = None
    sort: Sort = Sort.USED
    descending: bool = True


class Rewards(msgspec.Struct, frozen=True):
    """The rewards of the sessions that meet the conditions."""

    count: int
    mean: float
    """0 if there is none."""
    values: list[float]
    """In rising order; of more than `_REWARDS` rewards, some at equal distances in that order."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The sessions that meet the conditions, and what is counted over them."""

    entries: list[Entry]
    facets: dict[str, dict[str, int]]
    """For models, reasons, problems, classes and weight versions the number of sessions with each word."""
    rewards: Rewards
    reasons_over_time: dict[str, Any]
    """`start`, `step` in seconds; `counts`: for each reason the number of turns by the time of last use."""


_VALUES: dict[Sort, Callable[[Entry], float | str | None]] = {
    Sort.USED: lambda entry: entry.used,
    Sort.CREATED: lambda entry: entry.created,
    Sort.ID: lambda entry: entry.name,
    Sort.TURNS: lambda entry: entry.turns,
    Sort.IDS: lambda entry: entry.summary.ids if entry.summary else None,
    Sort.SAMPLED: lambda entry: entry.summary.sampled if entry.summary else None,
    Sort.REWARD: lambda entry: entry.reward,
    Sort.DRIFT: lambda entry: entry.summary.drift if entry.summary else None,
}


def select(entries: Iterable[Entry], query: ListQuery) -> Selection:
    """The sessions that meet the conditions. Those without a value to sort by come last."""
    found = [entry for entry in entries if _matches(entry, query)]
    value = _VALUES[query.sort]
    present = [entry for entry in found if value(entry) is not None]
    present.sort(key=lambda entry: (value(entry), entry.used, entry.id), reverse=query.descending)
    missing = [entry for entry in found if value(entry) is None]
    missing.sort(key=lambda entry: (entry.used, entry.id), reverse=True)
    ordered = [*present, *missing]
    summaries = [entry.summary for entry in found if entry.summary is not None]
    return Selection(
        entries=ordered,
        facets={
            "models": _sessions_with(summary.models for summary in summaries),
            "reasons": _sessions_with(map(_words, (summary.reasons for summary in summaries))),
            "problems": _sessions_with(map(_words, (summary.problems for summary in summaries))),
            "classes": _sessions_with(map(_words, (summary.classes for summary in summaries))),
            "weight_versions": _sessions_with(summary.weight_versions for summary in summaries),
        },
        rewards=_rewards(found),
        reasons_over_time=_reasons_over_time(found),
    )


def _matches(entry: Entry, query: ListQuery) -> bool:
    if query.search and query.search.lower() not in _searched(entry).lower():
        return False
    if query.rewarded is not None and query.rewarded != (entry.reward is not None):
        return False
    if not _in_range(entry.reward, query.reward_min, query.reward_max):
        return False
    if query.metadata and not metadata_matches(entry.metadata, query.metadata):
        return False
    summary = entry.summary
    if summary is None:
        return not (
            query.model
            or query.reason
            or query.problem
            or query.request_class
            or query.weight_version
            or query.drift is not None
        )
    return (
        (not query.model or query.model in summary.models)
        and (not query.reason or query.reason in _words(summary.reasons))
        and (not query.problem or query.problem in _words(summary.problems))
        and (not query.request_class or query.request_class in _words(summary.classes))
        and (not query.weight_version or query.weight_version in summary.weight_versions)
        and query.drift in (None, summary.drift > 0)
    )


def _searched(entry: Entry) -> str:
    """The text in which a search looks."""
    try:
        metadata = msgspec.json.decode(entry.metadata, type=dict[str, msgspec.Raw])
        return "\n".join([entry.name, *(f"{key}={_shown(value)}" for key, value in metadata.items())])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return entry.name


def _shown(value: msgspec.Raw) -> str:
    """A string as its text, another value as its JSON."""
    written = bytes(value)
    return msgspec.json.decode(written, type=str) if written.startswith(b'"') else written.decode()


def _rewards(entries: Iterable[Entry]) -> Rewards:
    values = sorted(entry.reward for entry in entries if entry.reward is not None)
    count = len(values)
    mean = math.fsum(value / count for value in values)
    if count > _REWARDS:
        values = [values[number * (count - 1) // (_REWARDS - 1)] for number in range(_REWARDS)]
    return Rewards(count, mean, values)


def _in_range(reward: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return reward is not None and (low is None or reward >= low) and (high is None or reward <= high)


def _words(counts: Counts) -> tuple[str, ...]:
    return tuple(word for word, _ in counts)


def _sessions_with(words: Iterable[Sequence[str]]) -> dict[str, int]:
    counter: Counter[str] = Counter()
    for each in words:
        counter.update(each)
    return dict(counter.most_common())


def _reasons_over_time(entries: Sequence[Entry]) -> dict[str, Any]:
    times = [entry.used for entry in entries]
    start = min(times, default=0.0)
    step = max((max(times, default=0.0) - start) / _BUCKETS, 1e-6)
    counts: dict[str, list[int]] = {}
    for entry in entries:
        bucket = min(_BUCKETS - 1, int((entry.used - start) / step))
        for reason, turns in entry.summary.reasons if entry.summary else ():
            counts.setdefault(reason, [0] * _BUCKETS)[bucket] += turns
    return {"start": start, "step": step, "counts": counts}
