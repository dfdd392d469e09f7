"""A chat request as a conversation: its messages by their digests.

The digests do not depend on model or tenant, and on tools only by the defaults that these declare: all
are in the `Scope`, which is part of every key of the index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import msgspec

from chat_tokenizer import CanonicalMessage, InvalidMessages, canonical
from chat_tokenizer.canonical import NO_DEFAULTS, ArgumentDefaults, extend, start
from tokenproxy.base.fields import values_in
from tokenproxy.base.media import media_kind

_parse = msgspec.json.Decoder(dict[str, Any]).decode
NOTHING = start()
"""Digest of a conversation before its first message."""
_DISTINCTIVE_BYTES = 120
"""A message with at least this many bytes is not sampled twice by chance."""
_COUNTED_FROM_BYTES = 2**19
MOST_VALUES = 400_000
"""The most values of a message besides its text: reading them keeps the interpreter's lock for 50 ms."""


class ParsedMessage(NamedTuple):
    """The digests (16 bytes) and flags of a message, without its text."""

    message: CanonicalMessage
    assistant: bool
    media: bool
    distinctive: bool
    """Whether an equal message elsewhere is a copy of this one: it is long, or holds tool calls with ids."""
    loose: bytes
    """Digest of the conversation up to and including this message, without the parts that clients drop or
    strip."""
    strict: bytes
    """Digest of the conversation up to and including this message, exactly as the client spells it."""


def parse_message(
    raw: bytes, index: int, before: ParsedMessage | None, defaults: ArgumentDefaults = NO_DEFAULTS
) -> ParsedMessage:
    """Parse a message of a conversation.

    Args:
        raw: the message as JSON.
        index: its position in the conversation, for errors.
        before: the message before it; None for the first.
        defaults: those of the conversation's tools.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is not a JSON object.
        InvalidMessages: it is not a chat message, or holds too many values to be read.
    """
    if memoryview(raw).nbytes > _COUNTED_FROM_BYTES and values_in(_without_text(raw)) > MOST_VALUES:
        raise InvalidMessages(f"message {index} holds more than {MOST_VALUES} values")
    message = _parse(raw)
    digests = canonical(message, index, defaults)
    loose, strict = (before.loose, before.strict) if before else (NOTHING, NOTHING)
    return ParsedMessage(
        digests,
        message["role"] == "assistant",
        media_kind(message.get("content")) is not None,
        is_distinctive(message),
        extend(loose, digests.loose),
        extend(strict, digests.strict),
    )


class _Content(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


def _without_text(raw: bytes) -> bytes:
    """A message without its content if that is a text."""
    data, content = bytes(raw), bytes(msgspec.json.decode(raw, type=_Content).content)
    return data.replace(content, b"", 1) if content[:1] == b'"' else data


def is_distinctive(message: dict[str, Any]) -> bool:
    """Whether an equal message elsewhere is a copy of this one. Independent of the client's spelling."""
    if message.get("tool_calls"):
        return True
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text.strip()) for text in texts if isinstance(text, str)) >= _DISTINCTIVE_BYTES


class LazyMessages(Sequence[dict[str, Any]]):
    """Messages that are parsed when they are read: in a long history, mostly only the last one."""

    def __init__(self, raws: Sequence[msgspec.Raw]) -> None:
        self._raws = raws
        self._parsed: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._raws)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position not in self._parsed:
            self._parsed[position] = _parse(self._raws[position])
        return self._parsed[position]


@dataclass
class Conversation:
    """The messages of a request."""

    raws: Sequence[msgspec.Raw]
    """Each message as the client spelled it."""
    messages: Sequence[ParsedMessage]
    defaults: ArgumentDefaults = NO_DEFAULTS
    """Those of its tools."""

    @cached_property
    def ends(self) -> list[int]:
        """Indexes of the assistant messages that others follow, where a turn may end; the last first."""
        last = len(self.messages) - 1
        return [i for i in range(last - 1, -1, -1) if self.messages[i].assistant]

    @property
    def ends_with_assistant(self) -> bool:
        """Whether no message follows the last assistant message."""
        return bool(self.messages) and self.messages[-1].assistant

    @property
    def holds_assistant(self) -> bool:
        """Whether it holds an assistant message, so that there may be a turn to continue."""
        return self.ends_with_assistant or bool(self.ends)

    @cached_property
    def media(self) -> bool:
        """Whether a message holds images or other media."""
        return any(message.media for message in self.messages)

    def loose_before(self, index: int) -> bytes:
        """The loose digest of the messages before one."""
        return self.messages[index - 1].loose if index else NOTHING

    def strict_before(self, index: int) -> bytes:
        """The strict digest of the messages before one."""
        return self.messages[index - 1].strict if index else NOTHING

    def history(self, end: int) -> "LazyMessages":
        """The messages before `end`, each parsed when it is read."""
        return LazyMessages(self.raws[:end])

    def parse(self, first: int = 0) -> list[dict[str, Any]]:
        """The messages from `first` on as objects."""
        return [_parse(raw) for raw in self.raws[first:]]

    def size(self, first: int = 0) -> int:
        """Bytes of the messages from `first` on."""
        return sum(memoryview(raw).nbytes for raw in self.raws[first:])

    def json(self, first: int) -> bytes:
        """The messages from `first` on as a JSON array, as they were spelled."""
        return b"[" + b",".join(bytes(raw) for raw in self.raws[first:]) + b"]"

    def reasonings(self, first: int = 0, end: int | None = None) -> list[bytes]:
        """Digests of the reasoning of the assistant messages from `first` to before `end`, or to the last."""
        return [parsed.message.reasoning for parsed in self.messages[first:end] if parsed.assistant]
