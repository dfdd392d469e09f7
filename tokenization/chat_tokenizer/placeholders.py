"""Where the images of a prompt are in its ids.

A chat template prints one placeholder for each image, a single id. The model's processor replaces it by the
ids of the image, which often hold the same id many times. Both forms arrive here: `single` and `expanded`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from chat_tokenizer.errors import TokenizationError

_BYTES = 4
"""Of an id in an array."""


class PlaceholdersDiffer(TokenizationError):
    """The ids do not hold one placeholder for each image."""


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
        PlaceholdersDiffer: there is not exactly one placeholder for each image.
    """
    packed = array("i", ids).tobytes()
    # the placeholders of adjacent images may look like an expansion of the first
    found = _read(packed, placeholder, images) or _read(packed, placeholder, [[placeholder]] * len(images))
    if found is None:
        raise PlaceholdersDiffer(
            f"the ids hold the placeholder {placeholder} {ids.count(placeholder)} times, which does not fit "
            f"{len(images)} images: send it once for each image, or all ids of each image"
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


def _read(packed: bytes, placeholder: int, images: Sequence[Sequence[int]]) -> list[Span] | None:
    """Where the images of a prompt are, expanded or not; None if there is another number of them.

    Ids that look like an expansion are one.
    """
    spans, end = [], 0
    for image in images:
        single, at = _find(packed, [placeholder], end), _find(packed, image, end)
        if at is not None and (single is None or at <= single):
            spans.append(Span(at, len(image)))
        elif single is not None:
            spans.append(Span(single, 1))
        else:
            return None
        end = spans[-1].offset + spans[-1].length
    return spans if _find(packed, [placeholder], end) is None else None


def _find(packed: bytes, part: Sequence[int], start: int) -> int | None:
    """The index of the first id from `start` on where some ids are; None if they are nowhere."""
    wanted = array("i", part).tobytes()
    at = packed.find(wanted, start * _BYTES)
    while at % _BYTES and at >= 0:
        at = packed.find(wanted, at + 1)
    return at // _BYTES if at >= 0 else None
