"""A stream whose events arrive together: what is sent together, and what is recorded before it is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.errors import EngineBroken
from proxy.fleet.weight_tags import WeightTag
from proxy.history.completion import Completion
from proxy.turn.stream import RecordedStream
from tests.support.recording import chat_request, rendered_plan, user
from tests.unit.turn.bodies import NOTHING, chunk, encoded, end, piece

_DONE = b"data: [DONE]\n\n"
_COMMENT = b": ping\n\n"


class _Response:
    """The response of an engine: blocks of whole events, pauses in seconds, and how it breaks off."""

    def __init__(self, *blocks: bytes | float | Exception) -> None:
        self.status = 200
        self.headers: list[tuple[bytes, bytes]] = []
        self._blocks = blocks

    async def chunks(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            if isinstance(block, Exception):
                raise block
            if isinstance(block, float):
                await asyncio.sleep(block)
            else:
                yield block

    async def aclose(self) -> None:
        """Nothing to close."""


class _Recording:
    """Notes the number of choices whenever something is recorded, and of cached ids where they are known."""

    def __init__(self, log: list[Any]) -> None:
        self.plan = rendered_plan([user("Hi")])
        self._log = log

    async def add(self, completion: Completion) -> None:
        self.add_later(completion)

    def add_later(self, completion: Completion) -> None:
        if completion.choices:
            number, cached = len(completion.choices), completion.cached_tokens
            self._log.append(number if cached is None else (number, cached))


def _event(*choices: Any, **fields: Any) -> bytes:
    return b"data: %b\n\n" % encoded(chunk(*choices, **fields))


def _sent(*texts: str) -> bytes:
    """The events of pieces, as the client gets them."""
    return b"".join(_event(piece(text=text, ids=None)) for text in texts)


_A, _B, _C = (_event(piece(text=text)) for text in "abc")
_END = _event(end())
_SENT_END = _event(end(ids=None))
_USAGE = _event(usage={"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 384}})
_BROKEN = EngineBroken("the connection broke")


def _stream(log: list[Any], *blocks: bytes | float | Exception, choices: int = 1) -> RecordedStream:
    return RecordedStream(
        cast(Any, _Response(*blocks)),
        chat_request(visible=NOTHING, choices=choices),
        cast(Any, _Recording(log)),
        cast(Any, SimpleNamespace(wants_body=False, abandon=lambda: None)),
        AsyncExitStack(),
        WeightTag(None, stream=True),
    )


async def _log(*blocks: bytes | float | Exception, choices: int = 1) -> list[Any]:
    """What happens, in order: the bytes that are sent, and the number of choices that are recorded."""
    log: list[Any] = []
    stream = _stream(log, *blocks, choices=choices)
    try:
        async for sent in stream.chunks():
            log += [sent]
    except EngineBroken as error:
        log.append(type(error))
    return log


async def test_events_that_arrive_together_are_sent_together() -> None:
    log = await _log(_A, _B + _COMMENT + _C, _END + _DONE)
    assert log == [_sent("a"), _sent("b") + _COMMENT + _sent("c"), 1, _SENT_END + _DONE]


async def test_events_before_the_end_of_a_turn_do_not_wait_for_the_record() -> None:
    log = await _log(_A + _B + _END + _DONE)
    assert log == [_sent("a", "b"), 1, _SENT_END + _DONE]


async def test_events_before_one_that_is_not_a_chunk_are_sent() -> None:
    log = await _log(_A + _B + b"data: {\n\n" + _C)
    assert log == [_sent("a", "b"), 1, EngineBroken]


async def test_a_stream_that_ends_before_its_turn_is_sent_and_recorded() -> None:
    assert await _log(_A + _B) == [_sent("a", "b"), 1, EngineBroken]


async def test_a_block_that_shows_nothing_sends_nothing() -> None:
    silent = _event(piece(text=None))
    assert await _log(_A, silent, silent + silent, _END) == [_sent("a"), 1, _SENT_END]


@pytest.mark.parametrize(
    "blocks",
    [
        (_END + _USAGE + _DONE,),
        (_END, _USAGE, _DONE),
        (_END, 0.001, _COMMENT, _USAGE + _DONE),
        (_END + _COMMENT + _USAGE, _DONE),
    ],
    ids=["together", "apart", "after-a-comment", "with-a-comment"],
)
async def test_the_usage_that_follows_a_turn_is_recorded_with_it(blocks: tuple[bytes | float, ...]) -> None:
    log = await _log(_A, *blocks)
    assert log[:2] == [_sent("a"), (1, 384)]
    assert b"".join(log[2:]).replace(_COMMENT, b"") == _SENT_END + _DONE


@pytest.mark.parametrize(
    "blocks, after",
    [
        ((0.2, _USAGE, _DONE), [_DONE]),
        ((_event(), _DONE), [_DONE]),
        ((_DONE,), [_DONE]),
        ((), []),
        ((_BROKEN,), [EngineBroken]),
        ((0.2, _BROKEN), [EngineBroken]),
        ((b"data: {\n\n",), [EngineBroken]),
        ((b'data: {"error":{"message":"no"}}\n\n',), [b'data: {"error":{"message":"no"}}\n\n']),
    ],
    ids=["late", "without-it", "none", "end", "broken", "broken-later", "no-chunk", "error"],
)
async def test_a_turn_is_recorded_and_sent_without_its_usage(
    blocks: tuple[bytes | float | Exception, ...], after: list[Any]
) -> None:
    [first, recorded, *sent] = await _log(_A, _END, *blocks)
    assert (first, recorded) == (_sent("a"), 1)
    assert [part for part in sent if not isinstance(part, bytes)] == [
        part for part in after if not isinstance(part, bytes)
    ]
    texts = b"".join(part for part in [_SENT_END, *after] if isinstance(part, bytes))
    assert b"".join(part for part in sent if isinstance(part, bytes)) == texts


async def test_comments_do_not_prolong_the_wait() -> None:
    comments = [part for _ in range(20) for part in (0.02, _COMMENT)]
    log = await _log(_END, *comments, _USAGE + _DONE)
    assert log[0] == 1
    assert len(log) > 10  # the comments after the wait are sent one by one


async def test_a_chunk_without_choices_at_the_beginning_is_not_the_usage() -> None:
    assert (await _log(_event(), _A, _END, _USAGE + _DONE))[1:] == [(1, 384), _SENT_END, _DONE]


async def test_only_the_last_choice_waits_for_the_usage() -> None:
    first, last = _event(end(index=0)), _event(end(index=1))
    log = await _log(first, 0.2, last, _USAGE, _DONE, choices=2)
    assert [part for part in log if not isinstance(part, bytes)] == [1, (1, 384)]
    assert log[0] == 1 and log[2] == (1, 384)


async def test_a_piece_after_the_end_of_its_choice_is_not_recorded() -> None:
    log: list[Any] = []
    stream = _stream(log, _A, _END + _B, _USAGE + _DONE)
    recorded: list[Completion] = []
    cast(Any, stream)._recording.add_later = recorded.append
    await stream.read()
    [[choice]] = [completion.choices for completion in recorded if completion.choices]
    assert choice.message["content"] == "a"


@pytest.mark.parametrize("after_s", [0.01, 0.1])
async def test_a_client_that_leaves_while_the_usage_is_awaited(after_s: float) -> None:
    log: list[Any] = []
    stream = _stream(log, _A, _END, 30.0, _USAGE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await stream.read()
    await stream.aclose()
    assert log == [1]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
