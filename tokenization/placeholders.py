"""Where the images of a prompt are in its ids.

A chat template prints one placeholder for each image, a single id. The model's processor replaces it by the
ids of the image, which often hold the same id many times. Both forms arrive here: `single` and `expanded`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenization.errors import TokenizationError

_BYTES = 4
"""Of an id in an array."""


class PlaceholdersDiffer(TokenizationError):
    """The ids do not hold one placeholder for each image, or can be read in several ways."""


@dataclass(frozen=True, slots=True)
class Span:
    """The ids of one image in a prompt."""

    offset: int
    length: int


def expand(
    ids: Sequence[int], placeholder: int, images: Sequence[Sequence[int]]
) -> tuple[list[int], list[Span]]:
    """Replace the single placeholders of images by the images' ids; expanded ones stay.

    Args:
        images: the ids of each image, in the order of the prompt.

    Returns:
        the ids with each image expanded, and where each image is in them.

    Raises:
        PlaceholdersDiffer: there is not exactly one placeholder for each image, or it is not certain which
            ids belong to which image.
    """
    readings, found = _read(array("i", ids), placeholder, images) or (0, [])
    if readings != 1:
        raise PlaceholdersDiffer(
            f"the ids hold the placeholder {placeholder} {ids.count(placeholder)} times, which fits "
            f"{len(images)} images in {'several ways' if readings else 'no way'}: send it once for each "
            "image, or all ids of each image"
        )
    whole: list[int] = []
    spans: list[Span] = []
    end = 0
    for span, image in zip(found, images, strict=True):
        whole += ids[end : span.offset]
        spans.append(Span(len(whole), len(image)))
        whole += image
        end = span.offset + span.length
    whole += ids[end:]
    return whole, spans


def find(ids: Sequence[int], placeholder: int, images: Sequence[Sequence[int]]) -> list[Span]:
    """Where expanded images are in the ids of a prompt.

    Raises:
        PlaceholdersDiffer: as `expand`, or an image is not expanded.
    """
    whole, spans = expand(ids, placeholder, images)
    if len(whole) != len(ids):
        raise PlaceholdersDiffer("the ids hold an image that is not expanded")
    return spans


def collapse(ids: Sequence[int], placeholder: int, spans: Sequence[Span]) -> list[int]:
    """The inverse of `expand`: ids with a single placeholder for each image."""
    out: list[int] = []
    end = 0
    for span in spans:
        out += ids[end : span.offset]
        out.append(placeholder)
        end = span.offset + span.length
    out += ids[end:]
    return out


def _read(
    ids: "array[int]", placeholder: int, images: Sequence[Sequence[int]]
) -> tuple[int, list[Span]] | None:
    """Read ids as a prompt of images; None if that is impossible.

    The next image is at the first place where its expansion or a single placeholder is. Of several readings
    those with the most expanded images count: ids that look like an expansion are one.

    Returns:
        the number of such readings, and one of them.
    """
    packed = ids.tobytes()
    single = array("i", [placeholder]).tobytes()
    expanded = [array("i", image).tobytes() for image in images]
    # by the end of the previous image: expanded images so far, readings so far, and the images of one of them
    ends: dict[int, tuple[int, int, tuple[Any, ...]]] = {0: (0, 1, ())}
    for image in expanded:
        reached: dict[int, tuple[int, int, tuple[Any, ...]]] = {}
        for end, (wholes, ways, spans) in ends.items():
            next_single, at = _find(packed, single, end), _find(packed, image, end)
            found = []
            if at is not None and (next_single is None or at <= next_single):
                found.append((Span(at, len(image) // _BYTES), wholes + 1))
            if next_single is not None and image != single:
                found.append((Span(next_single, 1), wholes))
            for span, count in found:
                new = (count, ways, (spans, span))
                old = reached.get(span.offset + span.length)
                if old is not None and old[0] == count:
                    new = (count, ways + old[1], old[2])
                if old is None or old[0] <= count:
                    reached[span.offset + span.length] = new
        ends = reached
    read = [each for end, each in ends.items() if _find(packed, single, end) is None]
    most = max((wholes for wholes, _, _ in read), default=0)
    best = [each for each in read if each[0] == most]
    if not best:
        return None
    spans, listed = best[0][2], []
    while spans:
        spans, span = spans
        listed.append(span)
    return sum(ways for _, ways, _ in best), listed[::-1]


def _find(packed: bytes, part: bytes, start: int) -> int | None:
    """The index of the first id from `start` on where some ids are; None if they are nowhere."""
    at = packed.find(part, start * _BYTES)
    while at % _BYTES and at >= 0:
        at = packed.find(part, at + 1)
    return at // _BYTES if at >= 0 else None
