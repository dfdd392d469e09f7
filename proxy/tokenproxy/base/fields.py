"""Parse JSON objects at their top level only, and join them again.

A request may hold 100k ids in one field. Field values stay raw bytes: a route decodes only the fields that it
needs, and the others are sent to the engine as they arrived.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.types import Fields

T = TypeVar("T")

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
NULL = b"null"
_AT = " - at `$"
_MISSING = "Object missing required field `"
_UNKNOWN = "Object contains unknown field `"
"""Parts of msgspec's messages: `Expected int, got str - at $.messages[0].role`."""


def parse(body: bytes) -> Fields:
    """The fields of a JSON object: `{"a": [1], "b": 2}` gives `a` as the bytes `[1]` and `b` as `2`.

    Raises:
        BadRequest: the body is not a JSON object; `param` is `body`.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest("the request body must be a JSON object", param="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", param="body") from error


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """A request body as a struct.

    Raises:
        BadRequest: a field is missing, unknown or wrong; `param` is its path, such as
            `messages[2].content[0].type`.
    """
    try:
        body.decode()  # parsing checks only the texts that it decodes, and others are read later
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(_AT)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", param="body") from error
    path = path.rstrip("`").removeprefix(".")
    for start, problem in ((_MISSING, "required"), (_UNKNOWN, "unknown field")):
        if text.startswith(start):
            path, text = f"{path}.{text.removeprefix(start)}".strip(".`"), problem
    if not path:
        path, text = "body", "the request body must be a JSON object"
    raise BadRequest(f"{path}: {text}", param=path)


def join(fields: Fields) -> bytes:
    """Encode fields as one JSON object. Values are copied unchanged."""
    return msgspec.json.encode(fields)


def raw(value: object) -> msgspec.Raw:
    """Encode a Python value as the value of a field."""
    return msgspec.Raw(msgspec.json.encode(value))


def is_null(value: msgspec.Raw) -> bool:
    """Whether a value is null. The value, which may be large, is not copied."""
    view = memoryview(value)
    return view.nbytes == len(NULL) and view == NULL


def values_in(value: bytes) -> int:
    """How many values JSON holds, at most: marks inside of texts count too."""
    return sum(map(value.count, (b"[", b"{", b":", b",")))


def raw_value(fields: Mapping[str, msgspec.Raw], name: str) -> bytes | None:
    """The raw bytes of a field, or None if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return None
    data = bytes(value)
    return None if data == NULL else data


def read(fields: Mapping[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    """Decode a field as a value of `kind`; None if it is missing or null.

    Raises:
        BadRequest: the value has another type; `param` is the field's name.
    """
    value = fields.get(name)
    if value is None or is_null(value):
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{name}`: {error}", param=name) from error


def flag(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether a field has a value that an engine reads as true."""
    return raw_value(fields, name) not in (None, b"false", b"0")


def stream_options(fields: Fields) -> Fields:
    """The stream options of a request; empty if they are not an object, which the engine refuses."""
    try:
        return read(fields, "stream_options", Fields) or {}
    except BadRequest:
        return {}
