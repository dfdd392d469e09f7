"""Ids of responses and of their items, and the encrypted content of items: names that clients send back.

All are made of the turn's id here and nowhere else. None holds text of the model.
"""

import re

from proxy.history.turn import new_id

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}
_ITEM = re.compile(r"(?:msg|rs|fc|ctc|cmp)_([0-9a-f]{32})[0-9a-f]{4}")
_ENCRYPTED = re.compile(r"([0-9a-f]{32})[0-9a-f]{4}")
_RESPONSE = "resp_"


def base_of(turn: str) -> str:
    """What the ids of a turn's response are made of: the turn's id, or a new one if it is not recorded."""
    return turn or new_id()


def response_id(base: str) -> str:
    """The id of a response."""
    return f"{_RESPONSE}{base}"


def item_id(kind: str, base: str, index: int) -> str:
    """The id of an output item.

    Args:
        kind: its `type`.
        index: its position in the output.
    """
    return f"{_PREFIXES[kind]}_{base}{index:04x}"


def input_item_id(response: str, index: int) -> str:
    """The id of an input item that its client gave none, in the list of a stored response's input."""
    return f"in_{response.removeprefix(_RESPONSE)}_{index}"


def encrypted_content(base: str, index: int) -> str:
    """The encrypted content of an output item."""
    return f"{base}{index:04x}"


def turn_of(name: object, encrypted: object = None) -> str | None:
    """The turn that an item's id names, or its encrypted content; None if neither was made here."""
    found = _ITEM.fullmatch(name) if isinstance(name, str) else None
    if found is None and isinstance(encrypted, str):
        found = _ENCRYPTED.fullmatch(encrypted)
    return found[1] if found else None


def compaction_of(encrypted: object) -> str | None:
    """The id of the compaction item that has this encrypted content; None if it was not made here."""
    made_here = isinstance(encrypted, str) and _ENCRYPTED.fullmatch(encrypted)
    return f"{_PREFIXES['compaction']}_{encrypted}" if made_here else None
