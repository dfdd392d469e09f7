"""The last request of a path of turns: its messages, tools and template arguments, as they were recorded."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from proxy.history.turn import Turn

T = TypeVar("T")


def messages_of(path: Sequence[Turn]) -> list[Any] | None:
    """All messages of a path, the last turn's answer included; None if those of one turn cannot be read."""
    conversation: list[Any] = []
    for turn in path:
        messages, message = parsed(turn.messages, list), parsed(turn.message, dict)
        if messages is None or message is None:
            return None
        conversation += [*messages, message]
    return conversation


def tools_of(path: Sequence[Turn]) -> list[Any] | None:
    """The tools of the last request; None if they cannot be read."""
    return parsed(_last_stated(turn.tools for turn in path) or b"[]", list)


def template_kwargs_of(path: Sequence[Turn]) -> dict[str, Any] | None:
    """The chat template's arguments of the last request; None if they cannot be read."""
    return parsed(_last_stated(turn.template_kwargs for turn in path) or b"{}", dict)


def parsed(stored: bytes, kind: type[T]) -> T | None:
    """Stored JSON of this type; None if it cannot be read."""
    try:
        return msgspec.json.decode(stored, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _last_stated(values: Iterable[bytes | None]) -> bytes:
    """The last value that is not None, which means "as in the turn before"; b"" if all are."""
    stated = b""
    for value in values:
        stated = stated if value is None else value
    return stated
