"""A stream whose events arrive together: what is sent together, and what is recorded before it is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.recording import rendered_plan, user
from tests.unit.turn.bodies import NOTHING, chunk, encoded, end, piece
from tokenproxy.base.errors import EngineBroken
from tokenproxy.fleet.weight_state import WeightTag
from tokenproxy.record.completion import Completion
from tokenproxy.turn.answer import Redactor
from tokenproxy.turn.stream import RecordedStream

_Block = bytes | float | Exception | asyncio.Event
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": ping\n\n"
_LONG_S = 60.0


class _Response:
    """The response of an engine: blocks of whole events, pauses in seconds, waits, and how it breaks off."""

    status = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, blocks: tuple[_Block, ...]) -> None:
        self._blocks = blocks

    async def chunks(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            if isinstance(block, Exception):
                raise block
            if isinstance(block, asyncio.Event):
                await block.wait()
            elif isinstance(block, float):
                await asyncio.sleep(block)
            else:
                yield block

    async def aclose(self) -> None:
        """Nothing to close."""


class _NeverResumed:
    """A turn that does not go on after a break."""

    def covers(self, completion: object, *, complete: bool) -> bool:
        return False

    async def end_segment(self, rests: object, why: str) -> bool:
        return False

    def give_up(self) -> None:
        """Nothing to give up."""


class _Recording:
    """Notes the number of choices whenever something is recorded, and of cached ids where they are known."""

    def __init__(self, log: list[Any], choices: int = 1) -> None:
        self.plan = rendered_plan([user("Hi")], choices=choices)
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
_ERROR = b'data: {"error":{"message":"no"}}\n\n'
_BROKEN = EngineBroken("the connection broke")


def _stream(recording: _Recording, *blocks: _Block, usage_s: float = _LONG_S) -> RecordedStream:
    return RecordedStream(
        cast(Any, _Response(blocks)),
        Redactor(NOTHING),
        cast(Any, recording),
        cast(Any, SimpleNamespace(retriable=False)),
        AsyncExitStack(),
        WeightTag(None, stream=True),
        cast(Any, _NeverResumed()),
        usage_s=usage_s,
    )


async def _log(*blocks: _Block, choices: int = 1, usage_s: float = _LONG_S) -> list[Any]:
    """What happens, in order: the bytes that are sent, and the number of choices that are recorded.

    An event among the blocks is set when the end of the turn was sent.
    """
    log: list[Any] = []
    stream = _stream(_Recording(log, choices), *blocks, usage_s=usage_s)
    try:
        async for sent in stream.chunks():
            log += [sent]
            for block in blocks:
                if isinstance(block, asyncio.Event) and _SENT_END in sent:
                    block.set()
    except EngineBroken as error:
        log.append(type(error))
    return log


@pytest.mark.parametrize(
    "blocks, log",
    [
        ((_A, _B + _COMMENT + _C, _END + _DONE), [_sent("a"), _sent("b") + _COMMENT + _sent("c"), 1,
                                                  _SENT_END + _DONE]),
        ((_A + _B + _END + _DONE,), [_sent("a", "b"), 1, _SENT_END + _DONE]),
        ((_A + _B + b"data: {\n\n" + _C,), [_sent("a", "b"), 1, EngineBroken]),
        ((_A + _B,), [_sent("a", "b"), 1, EngineBroken]),
        ((_A, _event(piece(text=None)), _event(piece(text=None)) * 2, _END), [_sent("a"), 1, _SENT_END]),
    ],
)  # fmt: skip
async def test_what_arrived_together_is_sent_together_and_a_turn_recorded_before_its_end(
    blocks: tuple[_Block, ...], log: list[Any]
) -> None:
    assert await _log(*blocks) == log


@pytest.mark.parametrize(
    "blocks",
    [
        (_END + _USAGE + _DONE,),
        (_END, 0.001, _COMMENT, _USAGE + _DONE),
    ],
)
async def test_the_usage_that_follows_a_turn_is_recorded_with_it(blocks: tuple[_Block, ...]) -> None:
    log = await _log(_A, *blocks)
    assert log[:2] == [_sent("a"), (1, 384)]
    assert b"".join(log[2:]).replace(_COMMENT, b"") == _SENT_END + _DONE


@pytest.mark.parametrize(
    "blocks, after, broken",
    [
        ((asyncio.Event(), _USAGE, _DONE), _DONE, False),
        ((_DONE,), _DONE, False),
        ((_BROKEN,), b"", True),
        ((_ERROR,), _ERROR, False),
    ],
)
async def test_a_turn_is_recorded_and_sent_without_its_usage(
    blocks: tuple[_Block, ...], after: bytes, broken: bool
) -> None:
    late = isinstance(blocks[0], asyncio.Event)
    log = await _log(_A, _END, *blocks, usage_s=0.0 if late else _LONG_S)
    assert log[:2] == [_sent("a"), 1]
    assert b"".join(part for part in log[2:] if isinstance(part, bytes)) == _SENT_END + after
    assert (log[-1] is EngineBroken) is broken


async def test_only_the_last_choice_waits_for_the_usage() -> None:
    ends = [_event(end(index=index)) for index in (0, 1)]
    log = await _log(ends[0], asyncio.Event(), ends[1], _USAGE, _DONE, choices=2)
    assert [part for part in log if not isinstance(part, bytes)] == [1, (1, 384)]
    assert log[0] == 1 and log[2] == (1, 384)


@pytest.mark.parametrize("usage_s", [_LONG_S, 0.0])
async def test_a_client_that_leaves_while_the_usage_is_awaited_or_later(usage_s: float) -> None:
    log: list[Any] = []
    stream = _stream(_Recording(log), _A, _END, asyncio.Event(), _USAGE, usage_s=usage_s)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.read()
    await stream.aclose()
    assert log == [1]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
