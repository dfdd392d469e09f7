"""The objects that clients make of the arguments of a tool call that are no JSON object.

A call whose JSON was cut off is completed by closing what is open in it; a member that has no value yet is
left out. LangChain does so (`parse_partial_json`), and pydantic-core (`from_json`, `allow_partial`), which
leaves out a string that was cut off. Clients that cannot read the arguments have an empty object.
"""

import json
from collections.abc import Iterator
from typing import Any

_MOST_CHARACTERS = 2**16
"""Longer texts count as read by no client: each character takes 0.1 us."""
_CLOSERS = {"{": "}", "[": "]"}


def completions(arguments: object) -> list[dict[str, Any]]:
    """The objects that clients may send back in place of arguments, a text or any other JSON value."""
    found: list[dict[str, Any]] = [{}]
    short = isinstance(arguments, str) and len(arguments) <= _MOST_CHARACTERS
    for text in _closed(str(arguments)) if short else ():
        try:
            # of equal keys the last one counts, as in clients
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value not in found:
            found.append(value)
    return found


def _closed(text: str) -> Iterator[str]:
    """The text up to its first complete value, or with all closed that is open in it: whole, and without its
    last member."""
    closers: list[str] = []
    starts: list[int] = []
    """Where the last member of each open object or array begins: at the comma before it, or at its start."""
    quoted = escaped = False
    for place, letter in enumerate(text):
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        elif letter in _CLOSERS:
            closers.append(_CLOSERS[letter])
            starts.append(place + 1)
        elif closers and letter == closers[-1]:
            closers.pop()
            starts.pop()
            if not closers:
                yield text[: place + 1]
                return
        elif letter == "," and starts:
            starts[-1] = place
    end = "".join(reversed(closers))
    yield text[: len(text) - escaped] + '"' * quoted + end
    if starts:
        yield text[: starts[-1]] + end


def _refuse(constant: str) -> None:
    raise ValueError(constant)
