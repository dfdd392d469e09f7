import asyncio
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenproxy.engine.sse import data_event, event_data, events, replace_data, split_events, whole_events

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


@settings(derandomize=True)
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
    assert sum(len(split_events(piece)) for piece in whole) == len(blocks)


@settings(derandomize=True)
@given(st.lists(st.integers(0, 12)))
def test_events_yields_the_data_of_each_event(sizes: list[int]) -> None:
    stream = b": comment\n\ndata: 1\n\nevent: x\ndata:2\r\n\r\nid: 7\n\ndata: a\ndata:  b\n\ndata: [DONE]\n\n"
    assert _collect(events(_cut(stream, sizes))) == [b"1", b"2", b"a\n b", b"[DONE]"]


def test_data_of_several_lines_stays_whole() -> None:
    stream = b"event: x\r\nid: 7\r\ndata: {\r\ndata:  1}\r\n\r\n: ping\n\ndata: last"
    several, comment, rest = split_events(stream)
    assert event_data(several) == b"{\n 1}"
    assert replace_data(several, b"{\n 1}") == several
    assert replace_data(several, b"2\n3") == b"event: x\nid: 7\ndata: 2\ndata: 3\n\n"
    assert (event_data(comment), comment) == (None, b": ping\n\n")
    assert (event_data(rest), rest) == (b"last", b"data: last\n\n")
    assert data_event(b"a\nb") == b"data: a\ndata: b\n\n"
