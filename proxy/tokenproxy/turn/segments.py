"""The segments of a turn whose engine broke off: what was sampled where, and by which weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenproxy.fleet.weight_state import WeightTag
from tokenproxy.fleet.weights import Weights
from tokenproxy.record.completion import SampledChoice
from tokenproxy.record.turn import Segment, WeightSpan


@dataclass(slots=True)
class _Part:
    """A segment of a turn, before it is known how many ids its choices have."""

    tag: WeightTag
    """Of all choices that have none in `tags`."""
    before: Mapping[int, int] | None = None
    """How many ids each choice had that had not ended, by its index; None in the first part: none."""
    ended: str = ""
    """As `Segment.ended`."""
    tags: dict[int, WeightTag] = field(default_factory=dict)
    """Of the choices that were resumed, by their index."""

    def tag_of(self, choice: int) -> WeightTag:
        """The tag of a choice, given its index."""
        return self.tags.get(choice, self.tag)


@dataclass(slots=True)
class Segments:
    """The segments of one turn; false as long as its engine did not break off."""

    _parts: list[_Part] = field(default_factory=list)
    """Those that ended, and the one that runs."""
    _dropped: list[Segment] = field(default_factory=list)
    """Those whose ids do not count, because the turn was sampled anew."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self, tag: WeightTag) -> None:
        """The turn is sent to a replica, with this tag."""
        if self._parts:
            self._parts[-1].tag = tag

    def begin_choice(self, choice: int, tag: WeightTag) -> None:
        """The rest of one choice, given its index, is sent to a replica."""
        self._parts[-1].tags[choice] = tag

    async def end(
        self, weights: Weights, tag: WeightTag, sampled: Mapping[int, int] | None, why: str
    ) -> None:
        """The engine broke off: what is sampled from now on belongs to another segment.

        Args:
            tag: of what was sent last.
            sampled: number of the ids so far of each choice that has not ended; None if the turn is sampled
                anew.
            why: why it broke off.
        """
        ended = self._parts[-1] if self._parts else _Part(tag)
        for each in (ended.tag, *ended.tags.values()):
            await weights.confirm(each)
            each.end()
        ended.ended = why
        if sampled is None:
            self._dropped.append(Segment(ended.tag.replica, 0, 0, why))
            self._parts = [_Part(tag)]
        else:
            self._parts = [*self._parts[:-1], ended, _Part(tag, sampled)]

    def add_to(self, choice: SampledChoice, began_anew: tuple[str, ...]) -> None:
        """Add its segments and their weights to a choice that ended.

        Args:
            began_anew: fields of the request that take no note of the segments before.
        """
        index, count, told = choice.index, len(choice.ids or ()), choice.weight_versions
        parts = [part for part in self._parts if part.before is None or index in part.before]
        starts = [part.before[index] if part.before else 0 for part in parts]
        segments: list[Segment] = [*self._dropped]
        spans: list[WeightSpan] = []
        for part, start, end in zip(parts, starts, [*starts[1:], count], strict=True):
            tag = part.tag_of(index)
            segments.append(Segment(tag.replica, start, end, "" if part is parts[-1] else part.ended))
            if start == end:
                continue  # the engine broke off before it sampled
            reported = [span for span in told if start <= span.start < end]
            if not reported:
                known, uncertain = tag.spans(index, end - start)
                reported = [WeightSpan(version, start + at, start + to) for version, at, to in known]
                choice.weights_uncertain |= uncertain
            spans += reported
        choice.segments, choice.weight_versions = tuple(segments), tuple(spans)
        choice.began_anew = began_anew if len(segments) > 1 else ()
