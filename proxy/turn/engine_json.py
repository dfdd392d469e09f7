"""Parse the JSON of engines: it may hold values that msgspec refuses, and a prompt of 100k ids."""

import json
import secrets
from typing import Any

import msgspec

from proxy.errors import EngineBroken

REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors with which msgspec refuses a value."""
CUT = b'"cut-%b"' % secrets.token_hex(16).encode()
"""Replaces an array that is cut out: valid JSON, and a value that neither clients nor engines know."""
CUT_FROM_BYTES = 16_384
"""Bytes of a body from which to cut arrays out, and convert them apart, is faster than to parse it whole."""

_ECHO = b'"prompt_token_ids":['
_MOST_DIGITS = 4300
"""The most digits of an integer that Python parses."""


def cut_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """Slice out the echoed prompt ids without parsing them, and put `CUT` there. Returns both.

    The quoted name with the bracket cannot be part of a JSON string. The caller checks whether it is a field
    of the completion itself: then the parsed field is `CUT`. Nothing is cut if the array holds strings or
    arrays, or if white space precedes it.
    """
    start = body.find(_ECHO) + len(_ECHO) - 1
    end = body.find(b"]", start) + 1
    if start < len(_ECHO) - 1 or not end:
        return None, body
    prompt = body[start:end]
    if b'"' in prompt or prompt.find(b"[", 1) > 0:
        return None, body
    return prompt, b"".join((memoryview(body)[:start], CUT, memoryview(body)[end:]))


def parse_leniently(data: bytes) -> Any:
    """Parse JSON as Python does: NaN and Infinity are numbers, and bytes that are not UTF-8 are replaced.

    Raises:
        EngineBroken: it is not JSON, or is nested too deeply.
    """
    try:
        return _lenient.decode(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise no_completion() from error


def dump(value: object) -> msgspec.Raw:
    """Encode a value of `parse_leniently` as JSON."""
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def encodable(text: str) -> str:
    """Remove lone surrogates, which UTF-8 cannot encode, from a string of `parse_leniently`."""
    return text.encode("utf-8", "replace").decode()


def no_completion() -> EngineBroken:
    """The error for a body, or the data of an event, that is not a JSON object."""
    return EngineBroken("the engine's response is not a chat completion")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


_lenient = json.JSONDecoder(parse_int=_integer)
