"""Server-sent events: where one ends, and what it carries."""

from collections.abc import AsyncIterator

_ENDS = (b"\n\n", b"\r\n\r\n")


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut only between events.

    A stream that breaks then always breaks between events, and whatever is said about it reaches the
    client as an event of its own. What is held back is at most one unfinished event.
    """
    held = b""
    async for chunk in chunks:
        data = held + chunk if held else chunk
        if data.endswith(_ENDS):
            held = b""
            yield data
            continue
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
        held = data[cut:]
        if cut:
            yield data[:cut]
    if held:
        yield held


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each event; comments and empty events are left out."""
    async for block in whole_events(chunks):
        for event in block.replace(b"\r\n", b"\n").split(b"\n\n"):
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
