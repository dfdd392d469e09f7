"""Parses what vLLM answers into the structs of `wire`, once, for its record and for its client.

A body with a field that the structs do not declare, or of another type, or that msgspec refuses, is read
field by field. It is written field by field too: nothing that an engine says is lost.
"""

from typing import Any

import msgspec
from msgspec import UNSET

from tokenproxy.base.types import Fields
from tokenproxy.turn.lenient import REFUSALS, fitting, no_completion, read_fields, read_list
from tokenproxy.turn.wire import NO_REASON, Choice, Completion, Delta, TellingChoice

# decoded from JSON, where `more` is not a field, are the classes that they extend


class OddCompletion(Completion, kw_only=True):
    """A completion that was read field by field."""

    why: str
    """What the structs do not declare, in words."""
    more: Fields
    """The fields that do not fit."""


class OddChoice(TellingChoice, kw_only=True):
    """A choice that was read field by field."""

    more: Fields


class OddDelta(Delta, kw_only=True):
    """A delta that was read field by field."""

    more: Fields


_EMPTY = (b"", b'""', b"0", b"[]", b"{}", b"false")
"""What an engine might write for no finish reason."""
_encode = msgspec.json.Encoder().encode
_skip = msgspec.json.Decoder(msgspec.Raw).decode
_decode = msgspec.json.Decoder(Completion).decode


def parse(body: bytes) -> Completion:
    """Parse a completion or a chunk.

    Raises:
        EngineBroken: it is not a JSON object, or is nested too deeply.
    """
    try:
        return _decode(body)
    except REFUSALS as error:
        why = str(error)
    fields = read_fields(body)
    if fields is None:
        raise no_completion()
    choices = read_list(bytes(fields["choices"])) if "choices" in fields else None
    if choices is not None:
        del fields["choices"]
    known, more = fitting(Completion, fields)
    if choices is not None:
        known["choices"] = tuple(
            [_read_choice(each) for data in choices if (each := read_fields(bytes(data)))]
        )
    return OddCompletion(**known, why=why, more=more)


def is_json(body: bytes) -> bool:
    """Whether a body is valid JSON, of which nothing is made."""
    try:
        _skip(body)
        return True
    except REFUSALS:
        return False


def encode(completion: Completion) -> bytes:
    """A completion or a chunk as JSON; the inverse of `parse`."""
    if isinstance(completion, OddCompletion):
        return _encode(_plain(completion))
    return _encode(completion)


def _read_choice(fields: Fields) -> Choice:
    known, more = fitting(TellingChoice, fields)
    if "delta" in more and (delta := read_fields(bytes(more["delta"]))) is not None:
        of_delta, others = fitting(Delta, delta)
        known["delta"] = OddDelta(**of_delta, more=others)
        del more["delta"]
    if bytes(more.get("finish_reason", b"")) not in _EMPTY:
        known["finish_reason"] = NO_REASON
    return OddChoice(**known, more=more)


def _plain(value: Any) -> Any:
    """A struct as a dict, with the fields that did not fit."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, (OddCompletion, OddChoice, OddDelta)):
        return value
    names = [name for name in value.__struct_fields__ if name not in ("more", "why")]
    fields = {name: _plain(getattr(value, name)) for name in names if getattr(value, name) is not UNSET}
    return {**fields, **value.more}
