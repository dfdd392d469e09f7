"""JSON as engines write it: with numbers and strings that msgspec refuses, and with a prompt of 100k ids."""

import json
from typing import Any

import msgspec

from proxy.errors import EngineBroken

REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""How msgspec refuses a value."""
CUT = b'"(cut)"'
"""What `cut_prompt` puts in place of the prompt: valid JSON, and not what an engine says there."""

_ECHO = b'"prompt_token_ids":['
_MOST_DIGITS = 4300
"""Of an integer that Python parses."""


def cut_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """The echoed prompt, most of the bytes, unparsed, and the completion with `CUT` in its place.

    The name with its quotes and the bracket can stand in no JSON string. Whether it is a field of the
    completion itself is for the caller to see: a parser then finds `CUT` there. Nothing is cut if the array
    holds strings or arrays, or is spelled with white space before it.
    """
    start = body.find(_ECHO) + len(_ECHO) - 1
    end = body.find(b"]", start) + 1
    if start < len(_ECHO) - 1 or not end:
        return None, body
    prompt = body[start:end]
    if b'"' in prompt or prompt.rfind(b"[") > 0:
        return None, body
    return prompt, b"".join((memoryview(body)[:start], CUT, memoryview(body)[end:]))


def parse_leniently(data: bytes) -> Any:
    """A JSON value as Python reads it: NaN and Infinity are numbers, and what is no UTF-8 is replaced.

    Raises:
        EngineBroken: it is no JSON, or nested too deeply.
    """
    try:
        return _lenient.decode(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise no_completion() from error


def dump(value: object) -> msgspec.Raw:
    """A value of `parse_leniently` as JSON again."""
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def encodable(text: str) -> str:
    """A string of `parse_leniently` without lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def no_completion() -> EngineBroken:
    """The error of a body, or of the data of an event, that is no JSON object."""
    return EngineBroken("the engine's response is no chat completion")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


_lenient = json.JSONDecoder(parse_int=_integer)
