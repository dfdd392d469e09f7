"""Running requests are cut off when the process stops, and end with the error `Stopping`."""

import asyncio

import pytest

from proxy.errors import Stopping
from proxy.turn.running import RunningRequests


async def _started(running: RunningRequests) -> "asyncio.Task[None]":
    """A request that waits in a block."""
    entered = asyncio.Event()

    async def wait() -> None:
        with running.cuttable():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await entered.wait()
    return task


async def test_running_requests_are_cut_and_later_ones_refused() -> None:
    running = RunningRequests()
    with running.cuttable():
        pass  # a request that ended
    tasks = [await _started(running) for _ in range(3)]
    assert running.cut() == 3
    for task in tasks:
        with pytest.raises(Stopping) as stopping:
            await task
        assert (stopping.value.code, stopping.value.retry_after) == ("stopping", 2)
        assert task.cancelling() == 0
    assert running.stopping
    assert running.cut() == 0
    with pytest.raises(Stopping), running.cuttable():
        raise AssertionError("entered")


async def test_a_client_that_leaves_meanwhile_wins() -> None:
    running = RunningRequests()
    task = await _started(running)
    running.cut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
