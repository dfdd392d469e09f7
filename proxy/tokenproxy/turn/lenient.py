"""JSON that msgspec refuses, parsed as Python does, and the fields of it that have a declared type."""

import json
from typing import Any, get_args

import msgspec

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.types import Fields

REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors with which msgspec refuses a value."""
_MOST_DIGITS = 4300
"""The most digits of an integer that Python parses."""


def parse_leniently(data: bytes) -> Any:
    """Parse JSON as Python does: NaN and Infinity are numbers. What UTF-8 cannot hold is replaced.

    Raises:
        EngineBroken: it is not JSON, or is nested too deeply.
    """
    try:
        return _encodable(_lenient.decode(data.decode("utf-8-sig", "replace")))
    except (ValueError, RecursionError) as error:
        raise no_completion() from error


def dump(value: object) -> msgspec.Raw:
    """Encode a value of `parse_leniently` as JSON."""
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def no_completion() -> EngineBroken:
    """The error for a body, or the data of an event, that is not a JSON object."""
    return EngineBroken("the engine's response is not a chat completion")


def read_fields(data: bytes) -> Fields | None:
    """The fields of a JSON object, each still JSON; None if it is another value. Raises EngineBroken."""
    try:
        return _decode_fields(data)
    except REFUSALS:
        value = parse_leniently(data)
    return {name: dump(item) for name, item in value.items()} if isinstance(value, dict) else None


def read_list(data: bytes) -> list[msgspec.Raw] | None:
    """The items of a JSON array, each still JSON; None if it is another value. Raises EngineBroken."""
    try:
        return _decode_list(data)
    except REFUSALS:
        value = parse_leniently(data)
    return [dump(item) for item in value] if isinstance(value, list) else None


def read_as(data: bytes, kind: Any) -> Any:
    """A JSON value as a value of `kind`. Raises msgspec.MsgspecError if it is another one."""
    try:
        return msgspec.json.decode(data, type=kind)
    except REFUSALS:
        return msgspec.convert(parse_leniently(data), kind)


def fitting(kind: type[msgspec.Struct], fields: Fields) -> tuple[dict[str, Any], Fields]:
    """The fields that have the types which a struct declares, and the others."""
    known: dict[str, Any] = {}
    more = dict(fields)
    for field in msgspec.structs.fields(kind):
        if field.name not in more:
            continue
        value = more.pop(field.name)
        try:
            is_raw = msgspec.Raw in get_args(field.type)
            known[field.name] = value if is_raw else read_as(bytes(value), field.type)
        except msgspec.MsgspecError:
            more[field.name] = value
    return known, more


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_lenient = json.JSONDecoder(parse_int=_integer)


def _encodable(value: Any) -> Any:
    """A value whose strings can all be encoded."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): _encodable(item) for name, item in value.items()}
    return value
