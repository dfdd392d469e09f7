"""Split a stream of bytes into server-sent events."""

from collections.abc import AsyncIterator

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


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""Yield the data of each event that has some: `: comment\n\ndata: a\ndata: b\n\n` gives only `a\nb`."""
    async for block in whole_events(chunks):
        for event in block.replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
