"""How long a history may be so that what is appended after it is computed from its rendering.

A rendering of 128k ids takes some 4 ms, in which it holds the GIL half of the time. Most templates take time
in proportion to the history, but not all: some loop over all messages for each message. So the limit is
measured for each template, in CPU time of the thread, when it is examined. Later the size alone decides, so
that the ids of a request do not depend on the load of the machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from chat_tokenizer.cache import serialized
from chat_tokenizer.errors import TokenizationError
from chat_tokenizer.histories import ANY_TOOLS, Messages, assistant, call, result, user
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import Renderer, RenderOptions

_MAX_SECONDS = 0.05
_MAX_MESSAGES, _MAX_BYTES = 1024, 2**21
_SHARE = 16
"""The first history that is measured has this share of the most messages or bytes."""


@runtime_checkable
class Measured(Protocol):
    """Messages that know their size."""

    @property
    def size(self) -> int:
        """Bytes of the messages as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class HistorySize:
    """A number of messages, and a number of bytes."""

    messages: int = _MAX_MESSAGES
    bytes: int = _MAX_BYTES

    def holds(self, history: Sequence[Message]) -> bool:
        """Whether a history has at most so many messages and bytes."""
        if len(history) > self.messages:
            return False
        size = history.size if isinstance(history, Measured) else len(serialized(list(history)))
        return size <= self.bytes


def measured_limit(template: Renderer, max_seconds: float = _MAX_SECONDS) -> HistorySize:
    """The size up to which a template renders a history in at most `max_seconds` of CPU time.

    Messages and bytes are doubled until a rendering takes longer, at most to a size that is the same for all
    templates. Conversations that the template refuses do not lower the limit.
    """

    def most(largest: int, histories: Sequence[Callable[[int], Messages]]) -> int:
        size = largest // _SHARE
        while size < largest and all(_seconds(template, of(2 * size)) <= max_seconds for of in histories):
            size *= 2
        return size

    return HistorySize(most(_MAX_MESSAGES, (_exchanges, _rounds)), most(_MAX_BYTES, (_long_texts,)))


def _seconds(template: Renderer, history: Messages) -> float:
    """CPU time of a rendering. The shorter of two: in one of them, garbage may be collected."""
    seconds = []
    for _ in range(2):
        began = time.thread_time()
        try:
            template.text(history, RenderOptions(ANY_TOOLS))
        except TokenizationError:
            return 0.0
        seconds.append(time.thread_time() - began)
    return min(seconds)


def _exchanges(count: int) -> Messages:
    return [user(), assistant()] * (count // 2)


def _rounds(count: int) -> Messages:
    return [user(), assistant("", tool_calls=[call()]), result(), assistant()] * (count // 4)


def _long_texts(size: int) -> Messages:
    text = "A text. " * (size // 32)
    return [user(text), assistant(text), user(text), assistant(text)]
