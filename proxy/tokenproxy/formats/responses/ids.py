"""Ids of responses and of their items, and the encrypted content of items: names that clients send back.

All are made of the turn's id here and nowhere else. None holds text of the model.
"""

import re

from tokenproxy.record.echo import TurnTokens, turn_in

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}
_ITEM = re.compile(r"(?:msg|rs|fc|ctc|cmp)_([A-Za-z0-9_-]{36,40})")
_PLAIN = re.compile(r"([0-9a-f]{32})[0-9a-f]{4}")
_RESPONSE = "resp_"
_RESPONSE_ID = re.compile(rf"{_RESPONSE}[0-9a-f]{{32}}")


def response_id(base: str) -> str:
    """The id of a response."""
    return f"{_RESPONSE}{base}"


def is_response_id(name: str) -> bool:
    """Whether a name that a client sent may be that of a stored response, not of another document."""
    return _RESPONSE_ID.fullmatch(name) is not None


class Names:
    """Names the items of one response: by tokens that name the turn, where it is recorded."""

    def __init__(self, base: str, tokens: TurnTokens | None = None) -> None:
        """`base`: the turn's id, or a new one if it is not recorded."""
        self._base = base
        self._tokens = tokens

    def item(self, kind: str, index: int) -> str:
        """The id of an output item.

        Args:
            kind: its `type`.
            index: its position in the output.
        """
        return f"{_PREFIXES[kind]}_{self.encrypted(index)}"

    def encrypted(self, index: int) -> str:
        """The encrypted content of an output item."""
        return self._tokens.token(index) if self._tokens else f"{self._base}{index:04x}"

    def call(self, own: str, index: int) -> str:
        """The id of a tool call, of which the engine has its own; see `TurnTokens.call_id`."""
        return self._tokens.call_id(own, index) if self._tokens else own


def input_item_id(response: str, index: int) -> str:
    """The id of an input item that its client gave none, in a compacted conversation."""
    return f"in_{response.removeprefix(_RESPONSE)}_{index}"


def turn_of(name: object, encrypted: object = None) -> str | None:
    """The turn that an item's id names, or its encrypted content; None if neither was made here.

    It is not verified that it is a turn of this client.
    """
    for token in tokens_of(name, encrypted):
        plain = _PLAIN.fullmatch(token)
        return plain[1] if plain else turn_in(token)
    return None


def tokens_of(name: object, encrypted: object = None) -> list[str]:
    """What the id of an item and its encrypted content hold, if they may have been made here."""
    item = _ITEM.fullmatch(name) if isinstance(name, str) else None
    found = [item[1]] if item else []
    if isinstance(encrypted, str):
        found.append(encrypted)
    return [token for token in found if _PLAIN.fullmatch(token) or turn_in(token)]


def compaction_of(encrypted: object) -> str | None:
    """The id of the compaction item that has this encrypted content; None if it was not made here."""
    return f"{_PREFIXES['compaction']}_{encrypted}" if tokens_of(None, encrypted) else None
