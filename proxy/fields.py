"""JSON objects taken apart at their top level only.

A request may carry 100k ids in one field. Its values stay bytes: they are looked at where a route
needs them and joined again for the engine, so nothing is parsed for the sake of passing it on.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from proxy.errors import BadRequest
from proxy.types import Fields

T = TypeVar("T")

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
NULL = b"null"


def parse(body: bytes) -> Fields:
    """The fields of a JSON object.

    Raises:
        BadRequest: the body is not JSON, or JSON but not an object; `param` is `body`.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest("the request body must be a JSON object", param="body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", param="body") from error


def join(fields: Fields) -> bytes:
    """The fields as one JSON object; values are copied as they are, and once: they may be megabytes."""
    parts: list[bytes | msgspec.Raw] = []
    for name, value in fields.items():
        parts += b",", msgspec.json.encode(name), b":", value
    parts[:1] = [b"{"]
    return b"".join([*parts, b"}"])


def raw(value: object) -> msgspec.Raw:
    """A Python value as a field."""
    return msgspec.Raw(msgspec.json.encode(value))


def is_null(value: msgspec.Raw) -> bool:
    """Whether a value is null, without a copy of one that is not."""
    view = memoryview(value)
    return view.nbytes == len(NULL) and view == NULL


def given(fields: Mapping[str, msgspec.Raw], name: str) -> bytes | None:
    """The bytes of a field, or None where it is missing or null."""
    value = fields.get(name)
    return None if value is None or is_null(value) else bytes(value)


def read(fields: Mapping[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    """A field as a value of `kind`, or None where it is missing or null.

    Raises:
        BadRequest: it holds something else; `param` is the field's name.
    """
    value = fields.get(name)
    if value is None or is_null(value):
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{name}`: {error}", param=name) from error


def read_messages(fields: Fields, name: str) -> list[dict[str, Any]] | None:
    """A field that holds a non-empty list of messages, or None where it is missing or null.

    Raises:
        BadRequest: it holds something else, or nothing; `param` is the field's name.
    """
    messages = read(fields, name, list[dict[str, Any]])
    if messages is not None and not messages:
        raise BadRequest(f"`{name}` must not be empty", param=name)
    return messages
