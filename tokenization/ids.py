"""Token ids as the bytes of a JSON array.

Law: an array that went through `check` is only ever sliced and joined, so the integers an engine
sees are the integers that arrived, in the same spelling. Parsing 100k ids into Python integers costs
milliseconds; the checks below are single passes in C over the bytes.

Every function takes bytes that a JSON parser has already accepted as one value.
"""

from collections.abc import Sequence

import msgspec

from tokenization.errors import InvalidIds

_PLAIN = b"0123456789, \t\r\n"
_SPACE = b" \t\r\n"
_SPACES = (b" ", b"\t", b"\r", b"\n")
_MOST_DIGITS = 20
"""Of a number in 64 bits."""


def check(raw: bytes) -> int:
    """The number of ids in a JSON array of non-negative integers.

    What is left after digits, commas and white space are taken out of a valid JSON value is `[]`
    exactly when it is a flat array of unsigned integers: quotes, letters (true, null, 1e3), points,
    minus signs and inner brackets all remain.

    Raises:
        InvalidIds: the value is something else, or empty. The message says what is wrong.
    """
    rest = raw.translate(None, _PLAIN)
    if rest == b"[]":
        count = raw.count(b",") + 1
        if count == 1 and not raw.strip(b"[] \t\r\n"):
            raise InvalidIds("must not be empty")
        return count
    raise InvalidIds(_complaint(raw, rest))


def _complaint(raw: bytes, rest: bytes) -> str:
    if not raw.lstrip().startswith(b"["):
        return "must be a list of integers"
    if b'"' in rest:
        return "must hold only integers, not strings"
    if b"t" in rest or b"f" in rest:
        return "must hold only integers, not booleans"
    if b"n" in rest:
        return "must hold only integers, not null"
    if b"." in rest or b"e" in rest or b"E" in rest:
        return "must hold only integers, not floats"
    if b"-" in rest:
        return "must hold no negative ids"
    return "must be a flat list of integers"


def last(raw: bytes) -> int:
    """The last id of a checked array.

    Raises:
        InvalidIds: it is larger than any id can be.
    """
    digits = raw[max(raw.rfind(b","), raw.find(b"[")) + 1 : raw.rfind(b"]")].strip()
    if len(digits) > _MOST_DIGITS:
        raise InvalidIds("must hold no ids beyond the vocabulary")
    return int(digits)


def join(raw: bytes, more: Sequence[int]) -> bytes:
    """A checked array with `more` ids behind it; the earlier bytes are copied, not re-encoded."""
    if not more:
        return raw
    return b"".join((memoryview(raw)[: raw.rfind(b"]")], b",", memoryview(dump(more))[1:]))


def compact(raw: bytes) -> bytes:
    """A checked array without white space: equal ids are then equal bytes."""
    return raw.translate(None, _SPACE) if any(space in raw for space in _SPACES) else raw


def dump(ids: Sequence[int]) -> bytes:
    """Ids as a compact JSON array."""
    return msgspec.json.encode(ids)
