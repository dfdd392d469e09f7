"""JSON that loses nothing: a strict parser, and an encoding in which different values differ."""

import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from chat_tokenizer.errors import InvalidMessages

_MOST_EXACT = 2**53
"""Up to here every whole number is a double."""
MAX_DEPTH = 100
"""JSON nested deeper is not parsed: a parser's own limit depends on the depth of the call stack."""

_ARRAYS, _OBJECTS = (list, tuple), (dict, Mapping)
"""Their types. `dict` comes first, because the check against an abstract class is slow."""

# the closing quote is optional, so that a text full of unclosed strings is matched in linear time
_STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{}]', re.DOTALL)


def parse(text: str) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deep, or would lose information.
    """
    # counting brackets is fast, and exact enough for nearly all texts: brackets in strings count too
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError("nested too deep")
    return _DECODER.decode(text)


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings."""
    depth = deepest = 0
    for token in _STRINGS_AND_BRACKETS.findall(text):
        if token in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in ("]", "}"):
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)


def pack(
    value: object,
    *,
    sort_keys: bool = True,
    keep_nulls: bool = True,
    number: Callable[[float], float] | None = None,
) -> bytes:
    """Encode a JSON value as bytes, so that different values have different encodings.

    Each item starts with its type and, if that varies, its length or number of members, so no text can
    imitate structure. Example: `{"a": [1, "b"]}` is `o1:s1:aa2:i1;s1:b`.

    Args:
        sort_keys: ignore the order of keys in objects.
        keep_nulls: tell a key whose value is null from a missing one.
        number: replaces each number.

    Raises:
        InvalidMessages: the value holds something that is not JSON.
    """
    out: list[bytes] = []
    # a stack instead of recursion: values from clients may be nested deeper than Python recurses
    stack: list[object] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            raw = item.encode("utf-8", "surrogatepass")
            out += b"s%d:" % len(raw), raw
        elif isinstance(item, _ARRAYS):
            out.append(b"a%d:" % len(item))
            stack += reversed(item)
        elif isinstance(item, _OBJECTS):
            keys = list(item) if keep_nulls else [key for key in item if item[key] is not None]
            for key in keys:
                if not isinstance(key, str):
                    raise InvalidMessages("the names in an object must be strings")
            if sort_keys:
                keys.sort()
            out.append(b"o%d:" % len(keys))
            for key in reversed(keys):
                stack += item[key], key
        elif number is not None and isinstance(item, int | float) and not isinstance(item, bool):
            out.append(_pack_scalar(number(item)))
        else:
            out.append(_pack_scalar(item))
    return b"".join(out)


def whole(number: float) -> float:
    """1 for 1.0: clients in JavaScript send it back so."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_double(number: float) -> float:
    """A number as JavaScript prints it, whose numbers all are doubles: 9007199254740993 as 9007199254740992.

    Digits beyond those that tell a double from its neighbours are zeros: 1234567890123456789 as
    1234567890123456800.
    """
    if isinstance(number, int) and abs(number) <= _MOST_EXACT:
        return number
    try:
        double = float(number)
    except OverflowError:
        return number  # an infinity there, which JSON does not have
    return int(Decimal(float.__repr__(double))) if double.is_integer() else double


def _pack_scalar(item: object) -> bytes:
    if item is None:
        return b"n"
    if isinstance(item, bool):
        return b"t" if item else b"f"
    if isinstance(item, int):
        return b"i%x;" % item  # hexadecimal, because Python refuses to print more than 4300 decimal digits
    if isinstance(item, float):
        return b"d%b;" % float.__repr__(item).encode()
    raise InvalidMessages(f"a value of type {type(item).__name__!r} is not JSON")
