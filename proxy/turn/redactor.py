"""Removes from an engine's completion the fields that the client did not request.

The proxy always requests ids, log-probabilities and usage from the engine. A client that requested them too
gets the engine's own bytes; for other clients these fields are null, and chunks that hold nothing else are
not sent.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.sse import event_data, replace_data
from proxy.fields import NULL, is_null, raw_value
from proxy.turn.engine_json import (
    CUT,
    REFUSALS,
    cut_prompt,
    dump,
    encodable,
    no_completion,
    parse_leniently,
)
from proxy.turn.request import EngineRoute, Visible
from proxy.turn.usual_chunk import UsualChunk
from proxy.types import Fields

_NULL = msgspec.Raw(NULL)
_PROMPT = "prompt_token_ids"
_IDS_IN_CHOICE = {
    EngineRoute.CHAT: ("token_ids",),
    EngineRoute.COMPLETIONS: ("token_ids", _PROMPT),
    EngineRoute.GENERATE: (),
}
"""The fields of a choice that hold ids which clients may request; generate always returns the sampled ids."""
_OF_PROMPT = (_PROMPT, "mm_placeholders")
"""Fields of a response of generate that `return_token_ids` requests."""
_REASONING = frozenset({"reasoning", "reasoning_content"})

_decode_object = msgspec.json.Decoder(Fields).decode
_decode_objects = msgspec.json.Decoder(list[Fields]).decode


def redact_completion(body: bytes, visible: Visible, route: EngineRoute = EngineRoute.CHAT) -> bytes:
    """A whole completion of a route with the fields that the client requested.

    Raises:
        EngineBroken: the body is not a JSON object.
    """
    if visible.everything:
        return body
    fields = _object(body) if route is EngineRoute.COMPLETIONS else _fields_of(body)
    if route is EngineRoute.GENERATE and not visible.ids:
        fields |= {name: _NULL for name in _OF_PROMPT if name in fields}
    return redact_fields(fields, _choices(fields), visible, route)


@dataclass(frozen=True, slots=True)
class StreamRedactor:
    """Redacts a stream, chunk by chunk."""

    visible: Visible
    route: EngineRoute = EngineRoute.CHAT

    def redact(self, event: bytes, usual: UsualChunk | None) -> bytes | None:
        """The event with the fields that the client requested; None if it holds none of them.

        Args:
            event: one with data.
            usual: its chunk, if that has the usual shape.

        Raises:
            EngineBroken: the data is not a JSON object.
        """
        if self.visible.every_chunk:
            return event
        if usual is not None and (redacted := usual.redacted(self.visible)) is not None:
            return redacted
        visible = self.parse(event_data(event) or b"")
        return None if visible is None else replace_data(event, visible)

    def parse(self, data: bytes) -> bytes | None:
        """`redact` for the data of an event, of any shape."""
        fields = _fields_of(data)
        choices = _choices(fields)
        if raw_value(fields, "error") is None and choices is not None and not self._shows(choices):
            return None
        if choices and not self.visible.running_usage:
            fields.pop("usage", None)
        if self.route is EngineRoute.GENERATE and choices:
            self._restore_generated(fields)
        return redact_fields(fields, choices, self.visible, self.route)

    def _restore_generated(self, fields: Fields) -> None:
        """Give a chunk of generate the fields that it has if they are not requested."""
        fields.setdefault("usage", _NULL)
        if not self.visible.ids:
            for name in _OF_PROMPT:
                fields.pop(name, None)

    def _shows(self, choices: list[Any]) -> bool:
        """Whether a chunk holds anything that the client requested."""
        if not choices:
            return self.visible.usage
        if self.route is not EngineRoute.CHAT:
            return True  # these routes send no chunk only for evidence
        evidence = self.visible.ids or self.visible.logprobs
        return evidence or any(_holds_more(choice, self.visible.reasoning) for choice in choices)


def _holds_more(choice: Fields | msgspec.Raw, reasoning: bool) -> bool:
    """Whether a piece of a choice holds fields other than evidence."""
    if isinstance(choice, msgspec.Raw) or raw_value(choice, "finish_reason") is not None:
        return True
    delta = raw_value(choice, "delta") or b"{}"
    if reasoning:
        return delta.strip(b"{} \t\r\n") != b""
    fields = _parsed(delta)
    return bool(fields.keys() - _REASONING) if isinstance(fields, dict) else True


def redact_fields(
    fields: Fields, choices: list[Any] | None, visible: Visible, route: EngineRoute = EngineRoute.CHAT
) -> bytes:
    """A completion or chunk as JSON with the fields that the client requested.

    Args:
        choices: its parsed choices; None if they have an odd shape.
    """
    if _PROMPT in fields and not visible.ids:
        fields[_PROMPT] = _NULL
    if not choices:
        return msgspec.json.encode(fields)
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if not visible.ids:
            choice |= {name: _NULL for name in _IDS_IN_CHOICE[route] if name in choice}
        if not visible.logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL
        if not visible.reasoning:
            _hide_reasoning(choice)
    return msgspec.json.encode({**fields, "choices": choices})


def _hide_reasoning(choice: dict[str, Any]) -> None:
    for name in ("message", "delta"):
        data = raw_value(choice, name)
        message = None if data is None else _parsed(data)
        if not isinstance(message, dict):
            continue
        hidden = {key: _NULL if key in _REASONING else value for key, value in message.items()}
        if name == "delta":  # a delta holds only the fields that change
            hidden = {key: value for key, value in hidden.items() if not is_null(value)}
        choice[name] = hidden


# --- parsing


def _fields_of(body: bytes) -> Fields:
    """The fields of a completion or chunk; its prompt is not parsed. Raises EngineBroken."""
    prompt, rest = cut_prompt(body)
    fields = _object(rest)
    if prompt is not None and raw_value(fields, _PROMPT) == CUT:
        fields[_PROMPT] = msgspec.Raw(prompt)
    elif prompt is not None:  # the array belongs to something inside the completion
        fields = _object(body)
    return fields


def _object(data: bytes) -> Fields:
    """The fields of a completion or chunk. Raises EngineBroken."""
    fields = _parsed(data)
    if not isinstance(fields, dict):
        raise no_completion()
    return fields


def _choices(fields: Fields) -> list[Any] | None:
    """The fields of each choice, or its bytes if it is not an object. None if the choices are not a list."""
    data = raw_value(fields, "choices") or b"[]"
    try:
        return _decode_objects(data)
    except REFUSALS:
        choices = parse_leniently(data)
        return [_fields(choice) for choice in choices] if isinstance(choices, list) else None


def _parsed(data: bytes) -> Fields | msgspec.Raw:
    """The fields of an object, each still JSON; for another value, its JSON."""
    try:
        return _decode_object(data)
    except REFUSALS:
        return _fields(parse_leniently(data))


def _fields(value: Any) -> Fields | msgspec.Raw:
    if not isinstance(value, dict):
        return dump(value)
    return {encodable(name): dump(item) for name, item in value.items()}
