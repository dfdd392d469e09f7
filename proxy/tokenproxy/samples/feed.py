"""Reads the feed of finished rollouts as samples, in steps of a limited size.

What is read is at least as new as the entry of the feed: a rollout that changes while it is read comes again
with its next revision.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tokenproxy.record.store import Session, Store
from tokenproxy.samples.samples import EVERYTHING, Refused, Sample, Selection, samples_of
from tokenproxy.samples.tree import parsed

ENTRIES_AT_ONCE = 100
"""Entries of the feed that are read from the store at a time."""
MOST_SCANNED = 1000
"""Entries that one step looks at: a filter that selects nothing must not keep a reader waiting."""
MOST_IDS = 2**19
"""Ids of samples after which a step returns. The last rollout may exceed it: a rollout is never divided."""
_CURSOR = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class FeedFilter:
    """Which samples a reader gets. Empty conditions select everything."""

    tenant: str | None = None
    """Whose rollouts; None for all."""
    metadata: tuple[str, ...] = ()
    """What the session's metadata must hold, as `metadata_matches` takes it."""
    weight_versions: frozenset[str] = frozenset()
    """Samples of which every turn was sampled by one of these weights alone or by several of them. Samples
    with a turn whose weights are unknown are not selected."""
    turns: Selection = EVERYTHING
    """What of a rollout is trained on; rollouts without any of it are not selected."""

    def selects_sample(self, sample: Sample) -> bool:
        """Whether the weights of a sample are as required."""
        versions = [{span.version for span in turn.weight_versions} for turn in sample.turns]
        return not self.weight_versions or all(each and each <= self.weight_versions for each in versions)


def metadata_matches(metadata: bytes, conditions: Sequence[str]) -> bool:
    """Whether a session's metadata, a JSON object, meet all conditions. Damaged ones meet none.

    Args:
        conditions: `KEY=VALUE`. The value is the text of a string, or the JSON of any other value, which is
            compared as JSON: `1` equals `1.0`. Keys may hold "=" too: `a=b=c` is met by the value `c` of the
            key `a=b` and by the value `b=c` of the key `a`.
    """
    if not conditions:
        return True
    values = parsed(metadata, dict[str, msgspec.Raw]) or {}
    return all(
        any(
            condition.startswith(f"{key}=") and _is_value(value, condition[len(key) + 1 :])
            for key, value in values.items()
        )
        for condition in conditions
    )


def metadata_condition(text: str) -> str:
    """A condition of `metadata_matches`. Raises ValueError if it is none, or its key is empty."""
    if "=" not in text[1:]:
        raise ValueError(f"not KEY=VALUE: {text!r}")
    return text


def cursor_position(text: str) -> int:
    """The position in the feed that a cursor stands for. Raises ValueError if it is no cursor."""
    if not _CURSOR.fullmatch(text):
        raise ValueError(f"not a cursor: {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class ReadRollout:
    """A finished rollout, with those of its samples that were selected."""

    session: Session
    samples: Sequence[Sample]
    refused: Sequence[Refused]


@dataclass(frozen=True, slots=True)
class FeedStep:
    """What one step read."""

    rollouts: Sequence[ReadRollout]
    position: int
    """The last position that the step looked at; the next step starts after it."""
    more: bool
    """Whether the feed may hold rollouts after that position."""


async def read_step(store: Store, after: int, limit: int, selected: FeedFilter) -> FeedStep:
    """Read the next finished rollouts after a position.

    Args:
        limit: of rollouts.

    Raises:
        StoreError: the store does not respond.
    """
    rollouts: list[ReadRollout] = []
    scanned = ids = 0
    while scanned < MOST_SCANNED:
        page = await store.feed(after, limit=ENTRIES_AT_ONCE, tenant=selected.tenant)
        for session in page.sessions:
            if len(rollouts) == limit or ids >= MOST_IDS:
                return FeedStep(rollouts, after, more=True)
            if metadata_matches(session.metadata, selected.metadata):
                rollout = await _read(store, session, selected)
                if rollout is not None:
                    rollouts.append(rollout)
                    ids += sum(
                        len(sample.prompt_ids) + len(sample.completion_ids) for sample in rollout.samples
                    )
            after = session.position
        scanned += len(page.sessions)
        if len(page.sessions) < ENTRIES_AT_ONCE:
            return FeedStep(rollouts, after, more=False)
    return FeedStep(rollouts, after, more=True)


async def _read(store: Store, session: Session, selected: FeedFilter) -> ReadRollout | None:
    """The samples of a rollout; None if it was removed since `session` was read, or if none is selected."""
    turns = await store.turns(session.id)
    if not turns:
        return None
    make = partial(samples_of, session=session, selection=selected.turns, revision=session.revision)
    found = await asyncio.to_thread(make, turns, session.rewards)
    samples = [sample for sample in found.samples if selected.selects_sample(sample)]
    if (selected.weight_versions or selected.turns.classes or selected.turns.on_policy) and not samples:
        return None
    return ReadRollout(session, samples, found.refused)


def _is_value(value: msgspec.Raw, text: str) -> bool:
    """Whether a text is a JSON value: the text of a string, or JSON that is equal."""
    decoded = msgspec.json.decode(value)
    if isinstance(decoded, str):
        return decoded == text
    try:
        return _are_equal(decoded, msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. In Python `True == 1`, in JSON they differ."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
