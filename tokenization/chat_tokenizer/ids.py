"""Token ids as the bytes of a JSON array.

Law: an array that `check` accepted is only sliced and joined, never parsed and printed again, so an engine
receives the integers that the client sent. Parsing 100k ids into Python integers takes milliseconds; each
function here is one pass in C over the bytes.

Every function expects bytes that a JSON parser has already accepted as one value.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from chat_tokenizer.errors import InvalidIds

_ARRAY_BYTES = b"0123456789, \t\r\n"
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_TEN_ZEROS = b"0" * 10
_SPACE = b" \t\r\n"
_SPACES = (b" ", b"\t", b"\r", b"\n")
_MAX_DIGITS = 20
"""Decimal digits of the largest unsigned integer of 64 bits."""
_COMMA, _ZERO, _TEN = np.uint8(ord(",")), np.uint8(ord("0")), np.uint8(10)
_PART = 32_768
_NUMPY_FROM_BYTES = 16_384
"""Bytes of an array from which numpy is faster than methods of `bytes`."""
_MAX_EXACT = 2**53
"""From here on, floats do not hold every integer."""
_MAX_ID = 2**31 - 1
"""Ids are stored as 32-bit integers."""


def check(raw: bytes) -> int:
    """Check that a JSON value is a non-empty array of non-negative integers; return their number.

    Removing digits, commas and white space from a valid JSON value leaves `[]` exactly if the value is a flat
    array of non-negative integers. Everything else leaves more: quotes, letters (`true`, `null`, `1e3`),
    points, minus signs or inner brackets. Example: `[1, 2.5]` leaves `[.]`.

    Raises:
        InvalidIds: the value is something else, or the array is empty. The message names the problem.
    """
    rest = raw.translate(None, _ARRAY_BYTES)
    if rest == b"[]":
        if len(raw) < _NUMPY_FROM_BYTES:
            commas = raw.count(b",")  # stops at each comma
        else:
            commas = int(np.count_nonzero(np.frombuffer(raw, np.uint8) == _COMMA))
        count = commas + 1  # `[]` and `[7]` have no comma
        if count == 1 and not raw.strip(b"[] \t\r\n"):
            raise InvalidIds("must not be empty")
        return count
    raise InvalidIds(_problem(raw, rest))


def check_size(raw: bytes) -> None:
    """Check that a checked array holds no ids of 2**31 and more, which no vocabulary has.

    Raises:
        InvalidIds: it does.
    """
    # few arrays hold numbers of ten digits, and to look for them takes a fraction of the time of packing
    if len(raw) < _NUMPY_FROM_BYTES:
        found = _TEN_ZEROS in raw.translate(_TO_ZEROS)
    else:
        runs = np.frombuffer(raw, np.uint8) - _ZERO < _TEN
        for more in (1, 2, 4, 2):  # ten in all: runs of 2, 4, 8, 10 digits
            runs = runs[more:] & runs[:-more]
        found = bool(runs.any())
    if found:
        pack(raw)


def check_whole(raw: bytes) -> tuple[bytes, int]:
    """As `check`, but whole floats count as integers, as in vLLM. Example: `[1.0, 2]` becomes `[1,2]`.

    Returns:
        the array, the same object if it holds no float, and the number of its ids.

    Raises:
        InvalidIds: as `check`.
    """
    try:
        return raw, check(raw)
    except InvalidIds:
        whole = _whole(raw)
        if whole is None:
            raise
        return whole, check(whole)


def _whole(raw: bytes) -> bytes | None:
    """An array of numbers with its floats as integers; None if it holds anything else, or a fraction."""
    try:
        values = msgspec.json.decode(raw, type=list[int | float])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not all(abs(value) < _MAX_EXACT and value == int(value) for value in values):
        return None
    return dump([int(value) for value in values])


def count_compact(raw: bytes) -> int:
    """The number of ids in a JSON array without white space; 0 for all other bytes, also for broken JSON."""
    if raw[:1] != b"[" or raw[-1:] != b"]" or len(raw) < 3:
        return 0
    whole, commas = np.frombuffer(raw, np.uint8), 0
    # in parts that fit a processor's cache; they overlap, because up to three bytes are compared
    for start in range(0, len(raw), _PART):
        part = whole[start : start + _PART + 2]
        ends, digits = part == _COMMA, part - _ZERO < _TEN
        commas += int(np.count_nonzero(ends[:_PART]))
        if start == 0:
            ends[0] = True
        if start + len(part) == len(raw):
            ends[-1] = True
        leading_zeros = ends[:-2] & (part[1:-1] == _ZERO) & digits[2:]
        if not (ends | digits).all() or (ends[1:] & ends[:-1]).any() or leading_zeros.any():
            return 0
    return commas + 1


def _problem(raw: bytes, rest: bytes) -> str:
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


def pack(raw: bytes) -> bytes:
    """The ids of a JSON value as little-endian 32-bit integers. Example: 8 bytes for `[5, 12]`.

    Raises:
        InvalidIds: it is not a non-empty array of integers from 0 to 2**31 - 1.
    """
    return _pack(raw, check(raw))


def pack_compact(raw: bytes) -> bytes:
    """As `pack`, for any bytes.

    Raises:
        InvalidIds: they are not a JSON array without white space of integers from 0 to 2**31 - 1.
    """
    count = count_compact(raw)
    if not count:
        raise InvalidIds("must be a list of integers without white space")
    return _pack(raw, count)


def _pack(raw: bytes, count: int) -> bytes:
    ids = np.fromstring(raw[raw.find(b"[") + 1 : raw.rfind(b"]")], np.int64, sep=",")
    # digits beyond 64 bits end at the largest integer
    if len(ids) != count or ids.max() > _MAX_ID:
        raise InvalidIds("must hold no ids beyond 2147483647")
    return ids.astype("<i4").tobytes()


def last(raw: bytes, count: int) -> list[int]:
    """The last ids of a checked array, at most `count`. Example: [5, 12] of `[7, 5, 12]`.

    Raises:
        InvalidIds: a number has more digits than any id has.
    """
    end = start = raw.rfind(b"]")
    for _ in range(count):
        start = raw.rfind(b",", 0, max(start, 0))
    numbers = [each.strip() for each in raw[(start if start >= 0 else raw.find(b"[")) + 1 : end].split(b",")]
    # check the digits first: Python refuses to parse integers of more than 4300 digits
    if any(len(digits) > _MAX_DIGITS for digits in numbers):
        raise InvalidIds("must hold no ids beyond the vocabulary")
    return list(map(int, numbers))


def join(raw: bytes, more: Sequence[int]) -> bytes:
    """A checked array with `more` ids appended. The bytes of the earlier ids are copied as they are.

    Example: `[5, 12` from `[5, 12]`, then `,` and `7]`.
    """
    return concatenate(raw, dump(more))


def concatenate(raw: bytes, more: bytes) -> bytes:
    """A checked array with another one appended, which may be `[]`. The bytes are copied as they are."""
    if more == b"[]":
        return raw
    return b"".join((memoryview(raw)[: raw.rfind(b"]")], b",", memoryview(more)[1:]))


def compact(raw: bytes) -> bytes:
    """A checked array without white space, so that equal ids become equal bytes."""
    for space in _SPACES:
        if space in raw:  # most clients send none: searching is faster than copying
            return raw.translate(None, _SPACE)
    return raw


def dump(ids: Sequence[int]) -> bytes:
    """Encode ids as a JSON array without white space."""
    return msgspec.json.encode(ids)
