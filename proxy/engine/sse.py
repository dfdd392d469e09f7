"""Split a stream of bytes into server-sent events."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

_END = re.compile(rb"\r?\n\r?\n")
_ENDS = (b"\n\n", b"\r\n\r\n")


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the same bytes, cut only between events.

    The chunks `data: 1\n\nda` and `ta: 2\n\n` become `data: 1\n\n` and `data: 2\n\n`. If the stream breaks,
    it then breaks between events, and an error event can follow. At most one unfinished event is held back.
    """
    unfinished = b""
    async for chunk in chunks:
        data = unfinished + chunk if unfinished else chunk
        if data.endswith(_ENDS):
            unfinished = b""
            yield data
            continue
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
        unfinished = data[cut:]
        if cut:
            yield data[:cut]
    if unfinished:
        yield unfinished


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    block: bytes
    """The event's lines as they arrived, and the empty line that ends it."""
    data: bytes | None
    """The values of its `data` lines, with line feeds between them; None if it has none, as a comment."""

    def with_data(self, data: bytes) -> bytes:
        """The event with other data: its own bytes if that is equal."""
        if data == self.data:
            return self.block
        other = [line for line in _lines(self.block) if line and not line.startswith(b"data:")]
        return b"".join(line + b"\n" for line in other) + data_event(data)


def data_event(data: bytes) -> bytes:
    r"""An event that is data alone: `data: a\ndata: b\n\n` of `a\nb`."""
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


async def parsed_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Yield each event, including those without data. Text after the last empty line is an event too."""
    async for block in whole_events(chunks):
        start = 0
        for end in _END.finditer(block):
            yield _event(block[start : end.end()])
            start = end.end()
        if start < len(block):
            yield _event(block[start:] + b"\n\n")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the data of each event that has some: `: comment\n\ndata: a\ndata: b\n\n` gives only `a\nb`."""
    async for event in parsed_events(chunks):
        if event.data is not None:
            yield event.data


def _event(block: bytes) -> Event:
    lines = [line[5:].removeprefix(b" ") for line in _lines(block) if line.startswith(b"data:")]
    return Event(block, b"\n".join(lines) if lines else None)


def _lines(block: bytes) -> list[bytes]:
    return block.replace(b"\r\n", b"\n").split(b"\n")
