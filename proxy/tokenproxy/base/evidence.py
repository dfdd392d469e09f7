"""What an engine reports about a choice beside its text, ids and log-probabilities: one row for each fact.

All rooms read this table: what is asked of an engine, what a client sees, how the pieces of a stream and the
segments of a resumed turn join, what is recorded and exported. A new fact is a new row.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from tokenproxy.base.request import EngineRoute

S = TypeVar("S", bound=msgspec.Struct)

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class WeightsOfIds(msgspec.Struct):
    """Sampled ids `start` to `end` (exclusive) of a choice, and the version of the weights."""

    version: str | int
    start: _Id
    end: _Id


class Joining(Enum):
    """How two values of a fact become one."""

    LAST = auto()
    """The later one counts."""
    CONCATENATED = auto()
    """The lists follow each other."""
    SHIFTED = auto()
    """So do spans, whose `start` and `end` count from the first id of the turn."""
    DROPPED = auto()
    """There is none."""


class Stored(NamedTuple):
    """How a fact is kept in the record of a turn."""

    kind: Any
    """Its type there; None stands for no value."""
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    whole: Callable[[Any], bool] = lambda stored: True
    """Whether what is stored is not cut off; cheaper than to unpack it."""


def _pack_lists(lists: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """The lengths of lists, and their items one after the other, as little-endian 32-bit integers."""
    parts = [len(each) for each in lists], [item for each in lists for item in each]
    lengths, items = (np.array(part, "<i4").tobytes() for part in parts)
    return lengths, items


def _unpack_lists(packed: tuple[bytes, bytes]) -> list[list[int]]:
    """The inverse of `_pack_lists`. Raises ValueError if they are cut off."""
    lengths, items = (np.frombuffer(part, "<i4").tolist() for part in packed)
    return [items[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _is_whole(packed: tuple[bytes, bytes]) -> bool:
    return not any(len(part) % 4 for part in packed)


AS_IT_IS = Stored(Any, lambda value: value, lambda value: value)
LISTS_OF_IDS = Stored(tuple[bytes, bytes] | None, _pack_lists, _unpack_lists, _is_whole)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact that an engine reports about a choice."""

    name: str
    """Of the field of a choice, of a recorded turn and of a turn in an export."""
    kind: Any
    """Its type. A value of another type is left out."""
    asked_by: str = ""
    """The field of a request that asks for it; empty if the engine or the client decides. The proxy asks
    engines that were found to know it, and clients that did not ask do not see it."""
    unasked: frozenset[str] = frozenset()
    """Routes of the engine that report it in any case."""
    per_id: bool = False
    """Whether it is a list with one entry for each sampled id. Lists of another length are left out."""
    pieces: Joining = Joining.LAST
    """Of one engine's stream."""
    segments: Joining = Joining.LAST
    """Of a turn that another engine continued."""
    stored: Stored | None = AS_IT_IS
    """None for a fact that the record keeps in a field with a meaning of its own."""

    def read(self, pieces: Sequence[msgspec.Raw]) -> Any:
        """The value of its pieces, in order, without those that hold something else; None if none is left."""
        values = []
        for piece in pieces:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                values.append(msgspec.json.decode(piece, type=self.kind | None))
        values = [value for value in values if value is not None]
        if not values or self.pieces is Joining.LAST:
            return values[-1] if values else None
        return [item for value in values for item in value]

    def shift(self, value: msgspec.Raw | None, before: int) -> msgspec.Raw | None:
        """The value that a later segment reports, or a piece of it; None for none.

        Args:
            before: number of the ids of the segments before.
        """
        if value is None or self.segments is Joining.DROPPED:
            return None
        if self.segments is not Joining.SHIFTED:
            return value
        spans = self.read([value])
        moved = [replace(span, start=span.start + before, end=span.end + before) for span in spans or ()]
        return msgspec.Raw(msgspec.json.encode(moved)) if moved else None

    def join(
        self, before: msgspec.Raw | None, after: msgspec.Raw | None, counts: tuple[int, int]
    ) -> msgspec.Raw | None:
        """The value of a turn of two segments; None for none.

        Args:
            counts: number of the ids of each.
        """
        after = self.shift(after, counts[0])
        if self.segments not in (Joining.CONCATENATED, Joining.SHIFTED):
            return before if after is None and self.segments is Joining.LAST else after
        lists = [([] if each is None else self.read([each]) or []) for each in (before, after)]
        if self.per_id and tuple(map(len, lists)) != counts:
            return None
        both = lists[0] + lists[1]
        return msgspec.Raw(msgspec.json.encode(both)) if both else None

    def pack(self, value: Any, count: int) -> Any:
        """What the record keeps of a value, for so many sampled ids."""
        if value is None or self.stored is None or (self.per_id and len(value) != count):
            return None
        return self.stored.pack(value)

    def unpack(self, stored: Any) -> Any:
        """The inverse of `pack`. Raises ValueError if it is damaged."""
        return stored if stored is None or self.stored is None else self.stored.unpack(stored)

    def is_whole(self, stored: Any) -> bool:
        """Whether what the record keeps is not cut off."""
        return stored is None or self.stored is None or self.stored.whole(stored)


WEIGHTS = "weight_versions"
EVIDENCE: tuple[Fact, ...] = (
    Fact(
        WEIGHTS,
        list[WeightsOfIds],
        asked_by="return_weight_versions",
        unasked=frozenset({EngineRoute.GENERATE}),
        pieces=Joining.CONCATENATED,
        segments=Joining.SHIFTED,
        stored=None,
    ),
    # base64 of an .npy array, of one engine
    Fact("routed_experts", str, segments=Joining.DROPPED),
    # the ids that could be sampled at each position
    Fact(
        "sampling_mask",
        list[list[_Id]],
        per_id=True,
        pieces=Joining.CONCATENATED,
        segments=Joining.CONCATENATED,
        stored=LISTS_OF_IDS,
    ),
)

ASKED = tuple(fact for fact in EVIDENCE if fact.asked_by)
"""Those that engines report only if they are asked."""
OF_ONE_ENGINE = tuple([fact.name for fact in EVIDENCE if fact.segments is Joining.DROPPED])
"""The names of those that only a turn of one segment has."""
RECORDED = tuple(fact for fact in EVIDENCE if fact.stored is not None)


def with_facts(base: type[S], facts: Sequence[Fact], kind: Callable[[Fact], Any], default: Any) -> type[S]:
    """A struct with a field for each fact.

    Args:
        kind: the type of the field of a fact.
        default: of all.
    """
    fields = [(fact.name, kind(fact), default) for fact in facts]
    made: Any = msgspec.defstruct(base.__name__, fields, bases=(base,), module=base.__module__)
    telling: type[S] = made
    return telling
