"""Split a stream of bytes into server-sent events."""

import re
from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec

_END = re.compile(rb"\r?\n\r?\n")
_ENDS = (b"\n\n", b"\r\n\r\n")
_DATA_EVENT_BYTES = len(b"data: \n\n")
"""What one line of data has around it; an event that has other lines too is longer."""


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the same bytes, cut only between events.

    The chunks `data: 1\n\nda` and `ta: 2\n\n` become `data: 1\n\n` and `data: 2\n\n`. If the stream breaks,
    it then breaks between events, and an error event can follow. At most one unfinished event is held back.
    """
    parts: list[bytes] = []
    """Of the event that has not ended."""
    last = b""
    """Its last three bytes: the end of an event may arrive in two chunks."""
    async for chunk in chunks:
        # an event may be a megabyte in many chunks: only the new bytes are searched
        cut = _last_end(last + chunk) - len(last) if b"\n" in chunk else 0
        if cut > 0:
            parts.append(chunk[:cut])
            yield b"".join(parts)
            parts, last, chunk = [], b"", chunk[cut:]
        if chunk:
            parts.append(chunk)
            last = (last + chunk[-3:])[-3:]
    if parts:
        yield b"".join(parts)


def _last_end(data: bytes) -> int:
    """Where the last event in some bytes ends; 0 if none does."""
    if data.endswith(_ENDS):
        return len(data)
    return max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One server-sent event."""

    block: bytes
    """The event's lines as they arrived, and the empty line that ends it."""
    data: bytes | None
    """The values of its `data` lines, with line feeds between them; None if it has none, as a comment."""

    def with_data(self, data: bytes) -> bytes:
        """The event with other data: its own bytes if that is equal."""
        if data == self.data:
            return self.block
        if self.data is not None and len(self.block) == len(self.data) + _DATA_EVENT_BYTES:
            return data_event(data)
        other = [line for line in _lines(self.block) if line and not line.startswith(b"data:")]
        return b"".join(line + b"\n" for line in other) + data_event(data)


def data_event(data: bytes) -> bytes:
    r"""An event that is data alone: `data: a\ndata: b\n\n` of `a\nb`."""
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def split_events(block: bytes) -> list[Event]:
    """The events of a block, including those without data. Text after the last empty line is an event too."""
    lines = block.split(b"\n")
    if not any(lines[1::2]) and not lines[-1] and len(lines) % 2 and b"\r" not in block:
        # nearly always: each event is one line
        return [_line_event(line) for line in lines[:-1:2]]
    ends = [0, *(end.end() for end in _END.finditer(block))]
    found = [_event(block[start:end]) for start, end in pairwise(ends)]
    if ends[-1] < len(block):
        found.append(_event(block[ends[-1] :] + b"\n\n"))
    return found


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the data of each event that has some: `: comment\n\ndata: a\ndata: b\n\n` gives only `a\nb`."""
    async for block in whole_events(chunks):
        for event in split_events(block):
            if event.data is not None:
                yield event.data


def _line_event(line: bytes) -> Event:
    block = line + b"\n\n"
    return Event(block, line[6:]) if line.startswith(b"data: ") else _event(block)


def _event(block: bytes) -> Event:
    lines = [line[5:].removeprefix(b" ") for line in _lines(block) if line.startswith(b"data:")]
    return Event(block, b"\n".join(lines) if lines else None)


def _lines(block: bytes) -> list[bytes]:
    return block.replace(b"\r\n", b"\n").split(b"\n")
