import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.sse import events, whole_events

_LINES = st.sampled_from(["data: {}", "data:x", "data: é", ": comment", "event: error", "id: 1"])
_EVENTS = st.lists(st.lists(_LINES, min_size=1, max_size=3), max_size=5)


async def _cut(stream: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    for size in sizes:
        yield stream[:size]
        stream = stream[size:]
    yield stream


def _collect(chunks: AsyncIterator[bytes]) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [chunk async for chunk in chunks]

    return asyncio.run(collect())


@given(
    _EVENTS,
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 12)),
    st.sampled_from(["", "data: half"]),
)
def test_bytes_are_unchanged_and_cut_between_events(
    blocks: list[list[str]], newline: str, sizes: list[int], rest: str
) -> None:
    end = newline * 2
    stream = ("".join(newline.join(lines) + end for lines in blocks) + rest).encode()
    pieces = _collect(whole_events(_cut(stream, sizes)))
    assert b"".join(pieces) == stream
    whole = pieces[:-1] if rest else pieces
    assert all(piece.endswith(end.encode()) for piece in whole)


async def test_complete_event_is_yielded_at_once() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\ndata: 2"
        await asyncio.Event().wait()

    assert await asyncio.wait_for(anext(whole_events(chunks())), 5) == b"data: 1\n\n"


async def test_broken_stream_yields_only_whole_events() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\nda"
        yield b"ta: 2"
        raise ConnectionError

    pieces = whole_events(chunks())
    assert await anext(pieces) == b"data: 1\n\n"
    with pytest.raises(ConnectionError):
        await anext(pieces)


@given(st.lists(st.integers(0, 12)))
def test_events_yields_the_data_of_each_event(sizes: list[int]) -> None:
    stream = b": comment\n\ndata: 1\n\nevent: x\ndata:2\r\n\r\nid: 7\n\ndata: a\ndata:  b\n\ndata: [DONE]\n\n"
    assert _collect(events(_cut(stream, sizes))) == [b"1", b"2", b"a\n b", b"[DONE]"]
