import asyncio

import pytest

from proxy.errors import Stopping
from proxy.turn.running import RunningRequests


async def _never(running: RunningRequests, entered: asyncio.Event) -> None:
    with running.cuttable():
        entered.set()
        await asyncio.Event().wait()


async def _started(running: RunningRequests) -> "asyncio.Task[None]":
    entered = asyncio.Event()
    task = asyncio.create_task(_never(running, entered))
    await entered.wait()
    return task


async def test_running_requests_are_cut() -> None:
    running = RunningRequests()
    tasks = [await _started(running) for _ in range(3)]
    assert running.cut() == 3
    for task in tasks:
        with pytest.raises(Stopping) as stopping:
            await task
        assert (stopping.value.code, stopping.value.retry_after) == ("stopping", 2)
        assert task.cancelling() == 0
    assert running.stopping
    assert running.cut() == 0


async def test_later_requests_are_refused() -> None:
    running = RunningRequests()
    running.cut()
    with pytest.raises(Stopping):
        await _never(running, asyncio.Event())


async def test_blocks_that_ended_are_not_cut() -> None:
    running = RunningRequests()
    with running.cuttable():
        pass
    with pytest.raises(ValueError), running.cuttable():
        raise ValueError
    assert running.cut() == 0


async def test_a_client_that_leaves_meanwhile_wins() -> None:
    running = RunningRequests()
    task = await _started(running)
    running.cut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_on_the_way_out_stays() -> None:
    running = RunningRequests()
    entered = asyncio.Event()

    async def fails() -> None:
        with running.cuttable():
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError

    task = asyncio.create_task(fails())
    await entered.wait()
    running.cut()
    with pytest.raises(ValueError):
        await task
