"""Running requests are cut off when the process stops; see `tests/contract/test_stopping.py`."""

import asyncio

import pytest

from tokenproxy.base.errors import Stopping
from tokenproxy.turn.services import RunningRequests
from tokenproxy.web.endpoint import Interruptible


async def test_a_client_that_leaves_meanwhile_wins() -> None:
    running, entered = RunningRequests(), asyncio.Event()

    async def wait() -> None:
        with Interruptible(running):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await entered.wait()
    assert running.cut() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(Stopping), Interruptible(running):
        raise AssertionError("entered")
