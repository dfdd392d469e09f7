"""Split a stream of bytes into server-sent events."""

import re
from collections.abc import AsyncIterator
from itertools import pairwise

_END = re.compile(rb"\r?\n\r?\n")
_ENDS = (b"\n\n", b"\r\n\r\n")


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
        if not parts and chunk.endswith(_ENDS):  # nearly always
            yield chunk
            continue
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


def event_data(event: bytes) -> bytes | None:
    """The values of an event's `data` lines, with line feeds between them; None if it has no such line."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in _lines(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def replace_data(event: bytes, data: bytes) -> bytes:
    """The event with other data and its other lines: its own bytes if the data is equal."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:  # nearly always
        return data_event(data)
    if data == event_data(event):
        return event
    other = [line for line in _lines(event) if line and not line.startswith(b"data:")]
    return b"".join(line + b"\n" for line in other) + data_event(data)


DONE = b"[DONE]"
"""The data of the last event of a stream, in OpenAI's format."""


def data_event(data: bytes) -> bytes:
    r"""An event that is data alone: `data: a\ndata: b\n\n` of `a\nb`."""
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def split_events(block: bytes) -> list[bytes]:
    """The events of a block, each with the empty line that ends it, as they arrived.

    Text after the last empty line is an event too.
    """
    if block.find(b"\n") == len(block) - 2 and block.endswith(b"\n\n") and b"\r" not in block:
        return [block]
    lines = block.split(b"\n")
    if not any(lines[1::2]) and not lines[-1] and len(lines) % 2 and b"\r" not in block:
        # nearly always: each event is one line
        return [line + b"\n\n" for line in lines[:-1:2]]
    ends = [0, *(end.end() for end in _END.finditer(block))]
    found = [block[start:end] for start, end in pairwise(ends)]
    if ends[-1] < len(block):
        found.append(block[ends[-1] :] + b"\n\n")
    return found


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the data of each event that has some: `: comment\n\ndata: a\ndata: b\n\n` gives only `a\nb`."""
    async for block in whole_events(chunks):
        for event in split_events(block):
            if (data := event_data(event)) is not None:
                yield data


def _lines(block: bytes) -> list[bytes]:
    return block.replace(b"\r\n", b"\n").split(b"\n")
