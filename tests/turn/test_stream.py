"""A stream whose events arrive together: what is sent together, and what is recorded before it is sent."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

from proxy.errors import EngineBroken
from proxy.fleet.weight_tags import WeightTag
from proxy.history.completion import Completion
from proxy.turn.stream import RecordedStream
from tests.history.recording import chat_request, rendered_plan, user
from tests.turn.bodies import NOTHING, chunk, encoded, end, piece

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": ping\n\n"


class _Response:
    """The response of an engine: blocks of whole events."""

    def __init__(self, *blocks: bytes) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self._blocks = blocks

    async def chunks(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            yield block

    async def aclose(self) -> None:
        """Nothing to close."""


class _Recording:
    """Notes the number of choices whenever something is recorded."""

    def __init__(self, log: list[Any]) -> None:
        self.plan = rendered_plan([user("Hi")])
        self._log = log

    async def add(self, completion: Completion) -> None:
        if completion.choices:
            self._log.append(len(completion.choices))


def _event(*choices: Any, **fields: Any) -> bytes:
    return b"data: %b\n\n" % encoded(chunk(*choices, **fields))


def _sent(*texts: str) -> bytes:
    """The events of pieces, as the client gets them."""
    return b"".join(_event(piece(text=text, ids=None)) for text in texts)


_A, _B, _C = (_event(piece(text=text)) for text in "abc")
_END = _event(end())
_SENT_END = _event(end(ids=None))


async def _log(*blocks: bytes) -> list[Any]:
    """What happens, in order: the bytes that are sent, and the number of choices that are recorded."""
    log: list[Any] = []
    stream = RecordedStream(
        cast(Any, _Response(*blocks)),
        chat_request(visible=NOTHING),
        cast(Any, _Recording(log)),
        cast(Any, SimpleNamespace(wants_body=False)),
        AsyncExitStack(),
        WeightTag(None, stream=True),
    )
    try:
        async for sent in stream.chunks():
            log += [sent]
    except EngineBroken as error:
        log.append(type(error))
    return log


async def test_events_that_arrive_together_are_sent_together() -> None:
    log = await _log(_A, _B + _COMMENT + _C, _END + _DONE)
    assert log == [_sent("a"), _sent("b") + _COMMENT + _sent("c"), 1, _SENT_END, _DONE]


async def test_events_before_the_end_of_a_turn_do_not_wait_for_the_record() -> None:
    log = await _log(_A + _B + _END + _DONE)
    assert log == [_sent("a", "b"), 1, _SENT_END, _DONE]


async def test_events_before_one_that_is_not_a_chunk_are_sent() -> None:
    log = await _log(_A + _B + b"data: {\n\n" + _C)
    assert log == [_sent("a", "b"), 1, EngineBroken]


async def test_a_stream_that_ends_before_its_turn_is_sent_and_recorded() -> None:
    assert await _log(_A + _B) == [_sent("a", "b"), 1, EngineBroken]


async def test_a_block_that_shows_nothing_sends_nothing() -> None:
    silent = _event(piece(text=None))
    assert await _log(_A, silent, silent + silent, _END) == [_sent("a"), 1, _SENT_END]
